"""Deltas -> content blocks and events of a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import msgspec

from windlass.core.constants import DECODE_ERRORS
from windlass.core.request import CallPiece, Delta, ToolCall, Usage
from windlass.wire.anthropic.schema import AnthropicErrorBody, AnthropicErrorDetail
from windlass.wire.schema.errors import ApiError
from windlass.wire.server.envelope import api_finish_reason
from windlass.wire.server.requests import TOO_LONG

_encode = msgspec.json.Encoder().encode
ERROR_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


def anthropic_error(refusal: ApiError) -> bytes:
    kind = ERROR_TYPES.get(refusal.status, "api_error" if refusal.status >= 500 else "invalid_request_error")
    message = f"prompt is too long: {refusal}" if refusal.code == TOO_LONG else str(refusal)  # by which clients know it
    return _encode(AnthropicErrorBody(error=AnthropicErrorDetail(type=kind, message=message)))


class MessageBuilder:
    """One message: pass every delta to `event`, then call `ending`."""

    def __init__(self, model: str, stops: Sequence[str] = ()) -> None:
        self.id = f"msg_{uuid4().hex}"
        self._model, self._stops = model, stops
        self._blocks: list[dict[str, Any]] = []
        self._open = ""
        """Kind of the block being written: `text`, `thinking`, or the id of a call; empty: none."""
        self._begun = False
        self._usage = Usage(prompt_tokens=0, completion_tokens=0)
        self._end: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._pieces: dict[str, str] = {}
        """Id of a call that comes in pieces -> its arguments so far."""

    def event(self, index: int, delta: Delta) -> bytes:
        if delta.usage is not None:
            self._usage = delta.usage
        events = b"" if self._begun else self._begin()
        if delta.reasoning:
            events += self._grow("thinking", delta.reasoning)
        if delta.content:
            events += self._grow("text", delta.content)
        for piece in delta.call_pieces:
            events += self._call_piece(piece)
        for call in delta.tool_calls:
            events += self._call(call)
        if delta.finish_reason is not None:
            events += self._close()
            self._end = self._ended(delta)
        return events

    def ending(self) -> bytes:
        return self._event("message_delta", delta=self._end, usage=self._counted()) + self._event("message_stop")

    def failed(self, refusal: ApiError) -> bytes:
        return b"event: error\ndata: " + anthropic_error(refusal) + b"\n\n"

    def message(self) -> dict[str, Any]:
        """The whole message."""
        return {**self._head(), "content": self._blocks, **self._end, "usage": self._counted()}

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self._model}

    def _begin(self) -> bytes:
        self._begun = True
        message: dict[str, Any] = {**self._head(), "content": [], **self._end, "usage": self._counted()}
        return self._event("message_start", message=message)

    def _counted(self) -> dict[str, Any]:
        usage = self._usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }

    def _ended(self, delta: Delta) -> dict[str, Any]:
        reason = api_finish_reason(delta.finish_reason or "stop", any(block["type"] == "tool_use" for block in self._blocks))
        if reason == "stop" and self._stops and delta.stop_token_id is None:
            return {"stop_reason": "stop_sequence", "stop_sequence": self._stops[0] if len(self._stops) == 1 else None}
        words = {"length": "max_tokens", "tool_calls": "tool_use"}
        return {"stop_reason": words.get(reason, "end_turn"), "stop_sequence": None}

    # --- blocks

    def _grow(self, kind: str, text: str) -> bytes:
        events = b""
        if self._open != kind:
            empty = {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}
            events = self._close() + self._add(kind, empty)
        self._blocks[-1][kind] += text
        return events + self._delta({"type": f"{kind}_delta", kind: text})

    def _call_piece(self, piece: CallPiece) -> bytes:
        events = b""
        if piece.id not in self._pieces:
            self._pieces[piece.id] = ""
            block = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": dict[str, Any]()}
            events = self._close() + self._add(piece.id, block)
        self._pieces[piece.id] += piece.arguments
        return events + self._delta({"type": "input_json_delta", "partial_json": piece.arguments})

    def _call(self, call: ToolCall) -> bytes:
        events = b""
        if call.id not in self._pieces:
            events = self._call_piece(CallPiece(id=call.id, name=call.name, arguments=call.arguments))
        self._blocks[-1]["input"] = _arguments(self._pieces.pop(call.id))
        return events + self._close()

    def _add(self, kind: str, block: dict[str, Any]) -> bytes:
        self._open = kind
        self._blocks.append(block)
        return self._event("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        kind, self._open = self._open, ""
        signed = self._delta({"type": "signature_delta", "signature": ""}) if kind == "thinking" else b""
        return signed + self._event("content_block_stop", index=len(self._blocks) - 1)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return self._event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _event(self, kind: str, **values: Any) -> bytes:
        return b"event: " + kind.encode() + b"\ndata: " + _encode({"type": kind, **values}) + b"\n\n"


def _arguments(text: str) -> dict[str, Any]:
    """Of a complete message; a call that was cut off has no input."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except DECODE_ERRORS:
        return {}
