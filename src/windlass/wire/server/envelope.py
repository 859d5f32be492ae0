"""What every answer begins with, and how answers end."""

from __future__ import annotations

import time
from uuid import uuid4

from windlass.core.client import Unavailable
from windlass.core.model import Frozen
from windlass.core.request import FinishReason


class Envelope(Frozen):
    id: str
    model: str
    created: int


def new_envelope(kind: str, model: str) -> Envelope:
    """`kind` is chatcmpl or cmpl."""
    return Envelope(id=f"{kind}-{uuid4().hex}", model=model, created=int(time.time()))


def finish_word(reason: FinishReason, has_calls: bool = False) -> str:
    """The API's word. It has none for answers that did not come to their end, which are errors."""
    if reason in ("cancelled", "error"):
        raise Unavailable("the answer was cut short because its engine was closed; ask again")
    return "tool_calls" if has_calls and reason == "stop" else reason
