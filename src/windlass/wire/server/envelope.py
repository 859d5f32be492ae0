"""Fields shared by all responses: id, model, created, and the finish reason."""

from __future__ import annotations

import time
from secrets import token_hex

from windlass.core.client import Unavailable
from windlass.core.model import Frozen
from windlass.core.request import FinishReason


class Envelope(Frozen):
    id: str
    model: str
    created: int
    fingerprint: str = ""
    """Of the server's software and model; empty: not told."""


def new_envelope(kind: str, model: str, fingerprint: str = "") -> Envelope:
    """`kind` is chatcmpl or cmpl."""
    return Envelope(id=f"{kind}-{token_hex(16)}", model=model, created=int(time.time()), fingerprint=fingerprint)


def api_finish_reason(reason: FinishReason, has_calls: bool = False) -> str:
    """As the API names it. Incomplete sequences have no name there and are errors."""
    if reason in ("cancelled", "error"):
        raise Unavailable("the response was interrupted because the engine was closed; retry")
    return "tool_calls" if has_calls and reason == "stop" else reason
