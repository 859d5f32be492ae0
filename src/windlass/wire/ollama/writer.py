"""Deltas -> lines of JSON, as Ollama writes them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from windlass.core.constants import DECODE_ERRORS
from windlass.core.request import Delta, Timings, Usage
from windlass.wire.ollama.schema import OllamaErrorBody
from windlass.wire.schema.errors import ApiError
from windlass.wire.server.envelope import api_finish_reason

_encode = msgspec.json.Encoder().encode
NANOSECONDS = 1_000_000_000
NDJSON = b"application/x-ndjson"


def ollama_error(refusal: ApiError) -> bytes:
    return _encode(OllamaErrorBody(error=str(refusal)))


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class LineWriter:
    """Of `/api/chat`, or of `/api/generate`, whose text is a field of its own."""

    def __init__(self, model: str, is_chat: bool) -> None:
        self._model, self._is_chat = model, is_chat
        self._last: Delta | None = None

    def event(self, index: int, delta: Delta) -> bytes:
        """One line; empty if there is nothing to send yet."""
        if delta.finish_reason is not None:
            self._last = delta
        if not (delta.content or delta.reasoning or delta.tool_calls):
            return b""
        return _encode({**self._head(), **self._body([delta]), "done": False}) + b"\n"

    def ending(self) -> bytes:
        return _encode({**self._head(), **self._body([]), **self._end(self._last)}) + b"\n"

    def failed(self, refusal: ApiError) -> bytes:
        return ollama_error(refusal) + b"\n"

    def whole(self, deltas: list[Delta]) -> bytes:
        return _encode({**self._head(), **self._body(deltas), **self._end(deltas[-1])})

    def _head(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": now()}

    def _body(self, deltas: list[Delta]) -> dict[str, Any]:
        text, thinking = "".join(delta.content for delta in deltas), "".join(delta.reasoning for delta in deltas)
        extra: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if not self._is_chat:
            return {"response": text, **extra}
        calls = [
            {"id": call.id, "function": {"index": number, "name": call.name, "arguments": _arguments(call.arguments)}}
            for number, call in enumerate(call for delta in deltas for call in delta.tool_calls)
        ]
        return {"message": {"role": "assistant", "content": text, **extra, **({"tool_calls": calls} if calls else {})}}

    def _end(self, delta: Delta | None) -> dict[str, Any]:
        reason = api_finish_reason(delta.finish_reason or "stop") if delta is not None else "stop"
        usage = (delta.usage if delta is not None else None) or Usage(prompt_tokens=0, completion_tokens=0)
        timings = (delta.timings if delta is not None else None) or Timings()
        total = timings.queue_seconds + timings.prefill_seconds + timings.decode_seconds
        return {
            "done": True,
            "done_reason": reason,
            "total_duration": int(total * NANOSECONDS),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": int(timings.prefill_seconds * NANOSECONDS),
            "eval_count": usage.completion_tokens,
            "eval_duration": int(timings.decode_seconds * NANOSECONDS),
        }


def _arguments(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except DECODE_ERRORS:
        return {}
