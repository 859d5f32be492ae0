"""Stream events -> core Deltas, for our server, vLLM's and others', whose chunks differ in optional fields."""

from __future__ import annotations

from typing import Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from windlass.core.client import Unavailable
from windlass.core.constants import DECODE_ERRORS
from windlass.core.request import Delta, FinishReason, ToolCall
from windlass.wire.client.errors import error_from_response
from windlass.wire.schema.chat import ChatChunk, ChunkChoice, ChunkDelta, ResponseToolCall
from windlass.wire.schema.completions import CompletionChoice, CompletionResponse
from windlass.wire.schema.errors import ErrorDetail
from windlass.wire.schema.logprobs import ChatLogprobs, read_chat_logprobs, read_completion_logprobs
from windlass.wire.schema.structs import ResponseStruct
from windlass.wire.schema.usage import UsageBody, read_usage

Body = TypeVar("Body")

_FINISH: dict[str, FinishReason] = {"length": "length", "abort": "cancelled", "cancelled": "cancelled", "error": "error"}
"""All other reasons (stop, tool_calls, content_filter) count as `stop`."""


class Reader(Protocol):
    def add(self, data: bytes) -> Delta | None:
        """None: nothing to return yet."""
        ...

    def end(self) -> Delta:
        """The last delta, after the last event, because usage follows the finish reason."""
        ...


class _StreamEnd:
    """Collects the finish reason and usage."""

    def __init__(self) -> None:
        self.reason: FinishReason | None = None
        self.usage: UsageBody | None = None

    def update(self, reason: str | None, usage: UsageBody | UnsetType | None) -> None:
        if reason is not None:
            self.reason = _FINISH.get(reason, "stop")
        if isinstance(usage, UsageBody):
            self.usage = usage

    def delta(self, calls: tuple[ToolCall, ...] = ()) -> Delta:
        if self.reason is None:
            raise Unavailable("the response was interrupted: the server closed the connection")
        usage = None if self.usage is None else read_usage(self.usage)
        return Delta(tool_calls=calls, finish_reason=self.reason, usage=usage)


class WholeChoice(ResponseStruct):
    """Of an answer that is not streamed: the message is one chunk with all of it."""

    delta: ChunkDelta = msgspec.field(default=ChunkDelta(), name="message")
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType | None = UNSET


class WholeChat(ResponseStruct):
    choices: list[WholeChoice] = []
    usage: UsageBody | UnsetType | None = UNSET
    error: ErrorDetail | str | UnsetType | None = UNSET


class ChatReader:
    def __init__(self, kind: type[ChatChunk] | type[WholeChat] = ChatChunk) -> None:
        self._kind = kind
        self._end = _StreamEnd()
        self._calls: dict[int, _Call] = {}

    def add(self, data: bytes) -> Delta | None:
        chunk = parse(data, self._kind)
        check_error(chunk.error)
        choice = chunk.choices[0] if chunk.choices else ChunkChoice()
        self._end.update(choice.finish_reason, chunk.usage)
        delta = choice.delta
        for call in delta.tool_calls or ():
            self._call(call)
        ids = tuple(choice.token_ids or ())
        found = Delta(
            content=delta.content or "",
            reasoning=_reasoning(delta),
            token_ids=ids,
            logprobs=read_chat_logprobs(choice.logprobs, ids),
        )
        return None if found == Delta() else found

    def end(self) -> Delta:
        return self._end.delta(tuple(call.complete() for _, call in sorted(self._calls.items())))

    def _call(self, piece: ResponseToolCall) -> None:
        """Pieces of a call carry its index; without one, a piece belongs to the last call unless it has an id."""
        if piece.index is not UNSET:
            index = piece.index
        else:
            index = max(self._calls, default=-1) + (1 if piece.id or not self._calls else 0)
        self._calls.setdefault(index, _Call()).add(piece)


def _reasoning(delta: ChunkDelta) -> str:
    return delta.reasoning_content or delta.reasoning or ""


class _Call:
    """A tool call assembled from pieces."""

    def __init__(self) -> None:
        self._id, self._name, self._arguments = "", "", ""

    def add(self, piece: ResponseToolCall) -> None:
        self._id = piece.id or self._id
        self._name += piece.function.name or ""
        self._arguments += piece.function.arguments or ""

    def complete(self) -> ToolCall:
        return ToolCall(id=self._id, name=self._name, arguments=self._arguments)


class CompletionReader:
    def __init__(self) -> None:
        self._end = _StreamEnd()

    def add(self, data: bytes) -> Delta | None:
        chunk = parse(data, CompletionResponse)
        check_error(chunk.error)
        choice = chunk.choices[0] if chunk.choices else CompletionChoice()
        self._end.update(choice.finish_reason, chunk.usage)
        ids = tuple(choice.token_ids or ())
        entries = read_completion_logprobs(choice.logprobs, ids)
        found = Delta(content=choice.text, token_ids=ids, logprobs=tuple(entry for entry in entries if entry is not None))
        return None if found == Delta() else found

    def end(self) -> Delta:
        return self._end.delta()


def read_finish_reason(word: str | None) -> FinishReason:
    return _FINISH.get(word or "", "stop")


def parse(data: bytes, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(data, type=kind)
    except DECODE_ERRORS as error:
        raise Unavailable(f"invalid response from the server: {error}") from None


def check_error(error: ErrorDetail | str | UnsetType | None) -> None:
    if error:
        raise error_from_response(None, error if isinstance(error, ErrorDetail) else ErrorDetail(message=str(error)))
