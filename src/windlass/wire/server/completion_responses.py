"""Deltas of completions -> chunks and complete responses, preceded by the prompt if `echo` is set."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from windlass.core.model import Frozen
from windlass.core.request import Delta, Usage
from windlass.wire.schema.completions import CompletionChoice, CompletionLogprobs, CompletionResponse
from windlass.wire.schema.errors import ApiError
from windlass.wire.schema.logprobs import Offsets, completion_logprobs, joined
from windlass.wire.schema.usage import usage_body
from windlass.wire.server.chat_responses import RunningUsage, stream_frame, usage_event
from windlass.wire.server.envelope import Envelope, api_finish_reason
from windlass.wire.sse import DONE_EVENT, event

_encode = msgspec.json.Encoder().encode


class Echo(Frozen):
    """The prompt of an echoed completion."""

    text: str
    first_token: str = ""
    """Its text: prompt log-probabilities start at the second token."""


class CompletionStream:
    """The events of one response with `n` choices per prompt. `echoes` has one entry per choice, or is empty."""

    def __init__(
        self,
        envelope: Envelope,
        *,
        num_choices: int = 1,
        n: int = 1,
        include_usage: bool = False,
        continuous_usage: bool = False,
        logprobs: bool = False,
        token_ids: bool = False,
        echoes: Sequence[Echo] = (),
    ) -> None:
        self._head, self._tail = stream_frame("text_completion", envelope, include_usage)
        self._n, self._include_usage = n, include_usage
        self._is_plain = not (logprobs or token_ids or continuous_usage)
        self._running = RunningUsage(num_choices, n) if continuous_usage else None
        self._choices = [
            _CompletionChoiceWriter(index, logprobs, token_ids, echoes[index] if echoes else None) for index in range(num_choices)
        ]
        self._text_heads = [self._head + b'{"index":%d,"text":' % index for index in range(num_choices)]
        self._text_tail = b',"logprobs":null,"finish_reason":null}' + self._tail

    def event(self, index: int, delta: Delta) -> bytes:
        """One event; empty if there is nothing to send yet."""
        choice = self._choices[index]
        if self._is_plain and delta.finish_reason is None and choice.is_echoed:
            return self._text_heads[index] + _encode(delta.content) + self._text_tail if delta.content else b""
        tail = self._tail if self._running is None else self._running.tail(index, delta)
        found = choice.add(delta)
        return b"" if found is None else self._head + _encode(found) + tail

    def failed(self, refusal: ApiError) -> bytes:
        """Ends a failed stream in place of `[DONE]`."""
        return event(refusal.body)

    def ending(self) -> bytes:
        usages = [choice.usage for choice in self._choices if choice.usage is not None]
        return usage_event(self._head, usages, self._n) + DONE_EVENT if self._include_usage else DONE_EVENT


class _CompletionChoiceWriter:
    """The state of one choice."""

    def __init__(self, index: int, logprobs: bool, token_ids: bool, echo: Echo | None) -> None:
        self._index, self._logprobs, self._token_ids = index, logprobs, token_ids
        self._echo = echo
        self._text = ""
        """The text so far, which offsets point into."""
        self._offsets = Offsets()
        self.usage: Usage | None = None
        self.is_echoed = echo is None

    def add(self, delta: Delta) -> CompletionChoice | None:
        text, logprobs = self._echoed(delta)
        text += delta.content
        if self._logprobs:
            self._text += delta.content
            logprobs = joined(logprobs, completion_logprobs(delta.logprobs, self._offsets, self._text))
        shows_ids = self._token_ids and bool(delta.token_ids)
        if not (text or logprobs.tokens or shows_ids or delta.finish_reason):
            return None
        self.usage = delta.usage or self.usage
        return CompletionChoice(
            index=self._index,
            text=text,
            logprobs=logprobs if self._logprobs else None,
            finish_reason=None if delta.finish_reason is None else api_finish_reason(delta.finish_reason),
            token_ids=list(delta.token_ids) if shows_ids else UNSET,
        )

    def _echoed(self, delta: Delta) -> tuple[str, CompletionLogprobs]:
        """The echo, once. With logprobs it waits for the prompt's, which arrive with or before the first token."""
        echo, nothing = self._echo, CompletionLogprobs(top_logprobs=[])
        is_early = self._logprobs and delta.prompt_logprobs is None and not delta.token_ids and delta.finish_reason is None
        if echo is None or self.is_echoed or is_early:
            return "", nothing
        self.is_echoed = True
        self._text = echo.text
        if not self._logprobs:
            return echo.text, nothing
        found = completion_logprobs(delta.prompt_logprobs or (), self._offsets, self._text, echo.first_token)
        self._offsets = Offsets(len(echo.text))
        return echo.text, found


def completion_response(
    envelope: Envelope,
    choices: Sequence[Sequence[Delta]],
    *,
    n: int = 1,
    logprobs: bool = False,
    token_ids: bool = False,
    echoes: Sequence[Echo] = (),
) -> CompletionResponse:
    """From all deltas of every choice, `n` choices per prompt."""
    return CompletionResponse(
        id=envelope.id,
        created=envelope.created,
        model=envelope.model,
        choices=[
            _whole(_CompletionChoiceWriter(index, logprobs, token_ids, echoes[index] if echoes else None), deltas)
            for index, deltas in enumerate(choices)
        ],
        usage=usage_body([deltas[-1].usage for deltas in choices if deltas[-1].usage is not None], n),
        system_fingerprint=envelope.fingerprint or UNSET,
    )


def _whole(choice: _CompletionChoiceWriter, deltas: Sequence[Delta]) -> CompletionChoice:
    """All deltas joined into one."""
    last = deltas[-1]
    assert last.finish_reason is not None, "no delta with a finish reason"
    found = choice.add(
        Delta(
            content="".join(delta.content for delta in deltas),
            token_ids=tuple(token for delta in deltas for token in delta.token_ids),
            logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
            prompt_logprobs=next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), None),
            finish_reason=last.finish_reason,
            usage=last.usage,
        )
    )
    assert found is not None
    return found
