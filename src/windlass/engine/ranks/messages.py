"""Messages between a rank process and its supervisor. No torch.

The first frame on the socket is the RankJob; the rank exits when the socket closes. Steps do not travel here: rank 0 broadcasts them.
"""

from __future__ import annotations

import msgspec

from windlass.core.launch import RankJob
from windlass.core.ranks.frames import frame
from windlass.engine.protocol import Failed, Loading
from windlass.parallel.group import Count

SECONDS_BETWEEN_BEATS = 0.5
SECONDS_WITHOUT_BEAT = 4.0
"""A process silent for so long is stopped or swapping, and stalls all other ranks."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Beat(Message, frozen=True):
    """Twice a second, from a thread of its own: in the middle of a step too."""

    steps: int = 0
    rows: int = 0
    """Tokens that went through the decoder."""
    step_seconds: float = 0.0
    """In steps, collectives too."""
    counts: dict[str, Count] = {}
    """By group and collective: `tp all_reduce`."""
    is_answer: bool = False
    """To AskBeat."""


class BuiltRank(Message, frozen=True):
    """Weights are there, the program is recorded; what is missing is the first step."""

    weights_bytes: int = 0


class Put(Message, frozen=True):
    key: str
    value: bytes


class Take(Message, frozen=True):
    id: int
    key: str
    timeout_seconds: float


RankSaid = Beat | Loading | BuiltRank | Failed | Put | Take


class Found(Message, frozen=True):
    """To Take."""

    id: int
    value: bytes


class NotFound(Message, frozen=True):
    id: int
    words: str


class AskBeat(Message, frozen=True):
    pass


SaidToRank = Found | NotFound | AskBeat

encode = msgspec.msgpack.Encoder().encode
decode_said = msgspec.msgpack.Decoder(RankSaid).decode
decode_told = msgspec.msgpack.Decoder(SaidToRank).decode


def framed(message: Message | Loading | Failed | RankJob) -> bytes:
    return frame(encode(message))
