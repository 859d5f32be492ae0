"""Deltas of a chat -> chunks and complete responses. Plain text chunks are assembled from precomputed bytes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from windlass.core.request import CallPiece, Delta, ToolCall, Usage
from windlass.wire.schema.chat import (
    ChatChoice,
    ChatLogprobs,
    ChatResponse,
    ChunkChoice,
    ChunkDelta,
    ResponseFunction,
    ResponseMessage,
    ResponseToolCall,
)
from windlass.wire.schema.errors import ApiError
from windlass.wire.schema.logprobs import chat_logprobs
from windlass.wire.schema.usage import usage_body
from windlass.wire.server.envelope import Envelope, api_finish_reason
from windlass.wire.server.visible_logprobs import VisibleLogprobs
from windlass.wire.sse import DONE_EVENT, event

_encode = msgspec.json.Encoder().encode


class ChatStream:
    """The events of one response with `n` choices: pass every choice's deltas to `event`, then call `ending`."""

    def __init__(
        self,
        envelope: Envelope,
        *,
        n: int = 1,
        include_usage: bool = False,
        continuous_usage: bool = False,
        logprobs: bool = False,
        token_ids: bool = False,
        has_stops: bool = False,
    ) -> None:
        """`continuous_usage`: every chunk has the usage so far. `has_stops`: the request has stop strings."""
        self._head, self._tail = stream_frame("chat.completion.chunk", envelope, include_usage)
        self._choices = [_ChatChoiceWriter(number, self._head, self._tail, VisibleLogprobs(has_stops)) for number in range(n)]
        self._include_usage, self._logprobs, self._token_ids = include_usage, logprobs, token_ids
        self._running = RunningUsage(n, n) if continuous_usage else None

    def event(self, index: int, delta: Delta) -> bytes:
        """Concatenated events; empty if there is nothing to send yet."""
        choice = self._choices[index]
        if self._running is not None:
            choice.tail = self._running.tail(index, delta)
        elif delta.finish_reason is None and not (
            delta.tool_calls or delta.call_pieces or delta.reasoning or self._logprobs or self._token_ids
        ):
            return choice.text(delta.content) if delta.content else b""
        if delta.finish_reason is None and not (delta.token_ids or _has_text(delta)):
            return b""  # accepted
        events = choice.opened() + self._pieces(choice, delta)
        if delta.finish_reason is not None:
            choice.usage = delta.usage
            word = api_finish_reason(delta.finish_reason, choice.num_calls > 0)
            events += choice.wrapped(ChunkChoice(index=index, finish_reason=word))
        return events

    def failed(self, refusal: ApiError) -> bytes:
        """Ends a failed stream in place of `[DONE]`."""
        return event(refusal.body)

    def ending(self) -> bytes:
        usages = [choice.usage for choice in self._choices if choice.usage is not None]
        return usage_event(self._head, usages, len(self._choices)) + DONE_EVENT if self._include_usage else DONE_EVENT

    def _pieces(self, choice: _ChatChoiceWriter, delta: Delta) -> bytes:
        shows_ids = self._token_ids and bool(delta.token_ids)
        shown = choice.shown.add(delta) if self._logprobs else []
        if not (_has_text(delta) or shows_ids or shown):
            return b""
        entries = chat_logprobs(shown, self._token_ids) if shown else None
        ids = list(delta.token_ids) if shows_ids else UNSET
        return choice.wrapped(ChunkChoice(index=choice.index, delta=choice.piece(delta), logprobs=entries, token_ids=ids))


def _has_text(delta: Delta) -> bool:
    return bool(delta.content or delta.reasoning or delta.tool_calls or delta.call_pieces)


class _ChatChoiceWriter:
    def __init__(self, index: int, head: bytes, tail: bytes, shown: VisibleLogprobs) -> None:
        self.index, self.shown, self.tail = index, shown, tail
        self.usage: Usage | None = None
        self._head = head
        self.num_calls = 0
        self._begun: dict[str, int] = {}
        """Id of a call that comes in pieces -> its index."""
        self._text_head = head + b'{"index":%d,"delta":{"content":' % index
        self._text_tail = b'},"logprobs":null,"finish_reason":null}' + tail
        self._is_open = False

    def opened(self) -> bytes:
        """The first event carries the role."""
        if self._is_open:
            return b""
        self._is_open = True
        return self.wrapped(ChunkChoice(index=self.index, delta=ChunkDelta(role="assistant", content="")))

    def text(self, content: str) -> bytes:
        event = self._text_head + _encode(content) + self._text_tail
        return event if self._is_open else self.opened() + event

    def _next_call(self) -> int:
        self.num_calls += 1
        return self.num_calls - 1

    def _call_piece(self, piece: CallPiece) -> ResponseToolCall:
        """The first one of a call has id, type and name."""
        is_first = piece.id not in self._begun
        index = self._begun[piece.id] = self._next_call() if is_first else self._begun[piece.id]
        function = ResponseFunction(name=piece.name or UNSET, arguments=piece.arguments)
        return ResponseToolCall(
            index=index, id=piece.id if is_first else UNSET, type="function" if is_first else UNSET, function=function
        )

    def wrapped(self, choice: ChunkChoice) -> bytes:
        return self._head + _encode(choice) + self.tail

    def piece(self, delta: Delta) -> ChunkDelta:
        calls = [self._call_piece(piece) for piece in delta.call_pieces]
        whole = [call for call in delta.tool_calls if self._begun.pop(call.id, None) is None]  # those that did not come in pieces
        calls += [response_tool_call(call, self._next_call()) for call in whole]
        return ChunkDelta(content=delta.content or UNSET, reasoning_content=delta.reasoning or UNSET, tool_calls=calls or UNSET)


class RunningUsage:
    """The usage so far, for chunks that carry it. `n`: choices in a row that share a prompt."""

    def __init__(self, num_choices: int, n: int) -> None:
        self._usages = [Usage(prompt_tokens=0, completion_tokens=0)] * num_choices
        self._n = n

    def tail(self, index: int, delta: Delta) -> bytes:
        """The bytes after a choice."""
        before = self._usages[index]
        if delta.usage is not None and (delta.finish_reason is not None or not before.completion_tokens):
            self._usages[index] = delta.usage
        if delta.finish_reason is None and delta.token_ids:
            count = self._usages[index].completion_tokens + len(delta.token_ids)
            self._usages[index] = msgspec.structs.replace(self._usages[index], completion_tokens=count)
        return b'],"usage":' + _encode(usage_body(self._usages, self._n)) + b"}\n\n"


def stream_frame(object: str, envelope: Envelope, include_usage: bool) -> tuple[bytes, bytes]:
    """The bytes before and after a choice."""
    values = {"id": envelope.id, "object": object, "created": envelope.created, "model": envelope.model}
    if envelope.fingerprint:
        values["system_fingerprint"] = envelope.fingerprint
    head = b"data: " + _encode(values)[:-1] + b',"choices":['
    return head, b'],"usage":null}\n\n' if include_usage else b"]}\n\n"


def usage_event(head: bytes, usages: Sequence[Usage], n: int) -> bytes:
    return head + b'],"usage":' + _encode(usage_body(usages, n)) + b"}\n\n"


def response_tool_call(call: ToolCall, index: int | None = None) -> ResponseToolCall:
    function = ResponseFunction(name=call.name, arguments=call.arguments)
    return ResponseToolCall(id=call.id, function=function, index=UNSET if index is None else index)


def chat_response(
    envelope: Envelope,
    choices: Sequence[Sequence[Delta]],
    *,
    logprobs: bool = False,
    token_ids: bool = False,
    has_stops: bool = False,
) -> ChatResponse:
    """From all deltas of every choice."""
    usages = [deltas[-1].usage for deltas in choices if deltas[-1].usage is not None]
    return ChatResponse(
        id=envelope.id,
        created=envelope.created,
        model=envelope.model,
        choices=[
            _whole(index, deltas, token_ids, VisibleLogprobs(has_stops) if logprobs else None)
            for index, deltas in enumerate(choices)
        ],
        usage=usage_body(usages, len(choices)),
        system_fingerprint=envelope.fingerprint or UNSET,
    )


def _whole(index: int, deltas: Sequence[Delta], token_ids: bool, shown: VisibleLogprobs | None) -> ChatChoice:
    calls = [response_tool_call(call) for delta in deltas for call in delta.tool_calls]
    content = "".join(delta.content for delta in deltas)
    reasoning = "".join(delta.reasoning for delta in deltas)
    finish = deltas[-1].finish_reason
    assert finish is not None, "no delta with a finish reason"
    return ChatChoice(
        index=index,
        message=ResponseMessage(
            content=content if content or not calls else None,
            reasoning_content=reasoning or UNSET,
            tool_calls=calls or UNSET,
        ),
        logprobs=None if shown is None else _all_logprobs(deltas, token_ids, shown),
        finish_reason=api_finish_reason(finish, bool(calls)),
        token_ids=[token for delta in deltas for token in delta.token_ids] if token_ids else UNSET,
    )


def _all_logprobs(deltas: Sequence[Delta], with_ids: bool, shown: VisibleLogprobs) -> ChatLogprobs:
    return chat_logprobs([entry for delta in deltas for entry in shown.add(delta)], with_ids)
