"""Messages between a rank process and its supervisor. No torch.

The first frame on the socket is the RankJob; the rank exits when the socket closes. Steps do not travel here: rank 0 broadcasts them.
"""

from __future__ import annotations

import msgspec

from windlass.core.launch import RankJob
from windlass.core.ranks.frames import frame
from windlass.core.tiers.stats import TierStats
from windlass.runtime.engine.protocol import EngineFailed, LoadProgress
from windlass.runtime.parallel.group import Count

HEARTBEAT_INTERVAL_SECONDS = 0.5
HEARTBEAT_TIMEOUT_SECONDS = 4.0
"""A process silent for so long is stopped or swapping, and stalls all other ranks."""


class RankMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class RankHeartbeat(RankMessage, frozen=True):
    """Twice a second, from a thread of its own: in the middle of a step too."""

    steps: int = 0
    rows: int = 0
    """Tokens that went through the decoder."""
    step_seconds: float = 0.0
    """Spent in steps, collectives included."""
    counts: dict[str, Count] = {}
    """By group and collective: `tp all_reduce`."""
    is_reply: bool = False
    """Reply to HeartbeatRequest."""
    tiers: TierStats | None = None
    """Where the rank's weights are; None: all in its first tier."""


class RankBuilt(RankMessage, frozen=True):
    """Weights are loaded and the program is recorded: ready for the first step."""

    weights_bytes: int = 0


class PutKey(RankMessage, frozen=True):
    key: str
    value: bytes


class TakeKey(RankMessage, frozen=True):
    id: int
    key: str
    timeout_seconds: float


FromRank = RankHeartbeat | LoadProgress | RankBuilt | EngineFailed | PutKey | TakeKey


class KeyFound(RankMessage, frozen=True):
    """Reply to TakeKey."""

    id: int
    value: bytes


class KeyMissing(RankMessage, frozen=True):
    id: int
    reason: str


class HeartbeatRequest(RankMessage, frozen=True):
    pass


ToRank = KeyFound | KeyMissing | HeartbeatRequest

encode = msgspec.msgpack.Encoder().encode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode


def framed(message: RankMessage | LoadProgress | EngineFailed | RankJob) -> bytes:
    return frame(encode(message))
