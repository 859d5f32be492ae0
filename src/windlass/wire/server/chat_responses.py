"""Deltas of a chat -> chunks and complete responses. Plain text chunks are assembled from precomputed bytes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from windlass.core.request import Delta, ToolCall, Usage
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
from windlass.wire.schema.logprobs import chat_logprobs
from windlass.wire.schema.usage import usage_body
from windlass.wire.server.envelope import Envelope, api_finish_reason
from windlass.wire.server.visible_logprobs import VisibleLogprobs
from windlass.wire.sse import DONE_EVENT

_encode = msgspec.json.Encoder().encode


class ChatStream:
    """The events of one response with `n` choices: pass every choice's deltas to `event`, then call `ending`."""

    def __init__(
        self,
        envelope: Envelope,
        *,
        n: int = 1,
        include_usage: bool = False,
        logprobs: bool = False,
        token_ids: bool = False,
        has_stops: bool = False,
    ) -> None:
        """`has_stops`: the request has stop strings."""
        self._head, self._tail = stream_frame("chat.completion.chunk", envelope, include_usage)
        self._choices = [_ChatChoiceWriter(number, self._head, self._tail, VisibleLogprobs(has_stops)) for number in range(n)]
        self._include_usage, self._logprobs, self._token_ids = include_usage, logprobs, token_ids

    def event(self, index: int, delta: Delta) -> bytes:
        """Concatenated events; empty if there is nothing to send yet."""
        choice = self._choices[index]
        if delta.finish_reason is None and not (delta.tool_calls or delta.reasoning or self._logprobs or self._token_ids):
            return choice.text(delta.content) if delta.content else b""
        events = choice.opened() + self._pieces(choice, delta)
        if delta.finish_reason is not None:
            choice.usage = delta.usage
            word = api_finish_reason(delta.finish_reason, choice.num_calls > 0)
            events += choice.wrapped(ChunkChoice(index=index, finish_reason=word))
        return events

    def ending(self) -> bytes:
        usages = [choice.usage for choice in self._choices if choice.usage is not None]
        return usage_event(self._head, usages, len(self._choices)) + DONE_EVENT if self._include_usage else DONE_EVENT

    def _pieces(self, choice: _ChatChoiceWriter, delta: Delta) -> bytes:
        shows_ids = self._token_ids and bool(delta.token_ids)
        shown = choice.shown.add(delta) if self._logprobs else []
        if not (delta.content or delta.reasoning or delta.tool_calls or shows_ids or shown):
            return b""
        entries = chat_logprobs(shown, self._token_ids) if shown else None
        ids = list(delta.token_ids) if shows_ids else UNSET
        return choice.wrapped(ChunkChoice(index=choice.index, delta=choice.piece(delta), logprobs=entries, token_ids=ids))


class _ChatChoiceWriter:
    def __init__(self, index: int, head: bytes, tail: bytes, shown: VisibleLogprobs) -> None:
        self.index, self.num_calls, self.shown = index, 0, shown
        self.usage: Usage | None = None
        self._head, self._tail = head, tail
        self._text_head = head + b'{"index":%d,"delta":{"content":' % index
        self._text_tail = b'},"logprobs":null,"finish_reason":null}' + tail
        self._opening = self.wrapped(ChunkChoice(index=index, delta=ChunkDelta(role="assistant", content="")))

    def opened(self) -> bytes:
        """The first event carries the role."""
        opening, self._opening = self._opening, b""
        return opening

    def text(self, content: str) -> bytes:
        event = self._text_head + _encode(content) + self._text_tail
        return self.opened() + event if self._opening else event

    def wrapped(self, choice: ChunkChoice) -> bytes:
        return self._head + _encode(choice) + self._tail

    def piece(self, delta: Delta) -> ChunkDelta:
        calls = [response_tool_call(call, index) for index, call in enumerate(delta.tool_calls, start=self.num_calls)]
        self.num_calls += len(calls)
        return ChunkDelta(content=delta.content or UNSET, reasoning_content=delta.reasoning or UNSET, tool_calls=calls or UNSET)


def stream_frame(object: str, envelope: Envelope, include_usage: bool) -> tuple[bytes, bytes]:
    """The bytes before and after a choice."""
    values = {"id": envelope.id, "object": object, "created": envelope.created, "model": envelope.model}
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
