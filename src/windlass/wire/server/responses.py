"""Core Deltas -> what is answered over HTTP: streams of events, whole responses, errors in the middle of a stream."""

from __future__ import annotations

from windlass.wire.schema.errors import error_body
from windlass.wire.schema.usage import usage_body
from windlass.wire.server.chat_responses import ChatStream, chat_response
from windlass.wire.server.completion_responses import CompletionStream, Echo, completion_response
from windlass.wire.server.envelope import Envelope, finish_word, new_envelope
from windlass.wire.sse import event

__all__ = [
    "ChatStream",
    "CompletionStream",
    "Echo",
    "Envelope",
    "chat_response",
    "completion_response",
    "error_event",
    "finish_word",
    "new_envelope",
    "usage_body",
]


def error_event(message: str, *, type: str = "server_error", code: str | None = None) -> bytes:
    """What a stream that cannot go on ends with, in place of `[DONE]`: its status was sent long ago."""
    return event(error_body(message, type=type, code=code))
