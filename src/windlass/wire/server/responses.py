"""Core Deltas -> responses: event streams, complete bodies, and error events."""

from __future__ import annotations

from windlass.wire.schema.errors import error_body
from windlass.wire.schema.usage import usage_body
from windlass.wire.server.chat_responses import ChatStream, chat_response
from windlass.wire.server.completion_responses import CompletionStream, Echo, completion_response
from windlass.wire.server.envelope import Envelope, api_finish_reason, new_envelope
from windlass.wire.sse import event

__all__ = [
    "ChatStream",
    "CompletionStream",
    "Echo",
    "Envelope",
    "api_finish_reason",
    "chat_response",
    "completion_response",
    "error_event",
    "new_envelope",
    "usage_body",
]


def error_event(message: str, *, type: str = "server_error", code: str | None = None) -> bytes:
    """Ends a failed stream in place of `[DONE]`, since the status has already been sent."""
    return event(error_body(message, type=type, code=code))
