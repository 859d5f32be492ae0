"""What a rank must know to find the others of its epoch. A value; how they connect: parallel/join.py."""

from __future__ import annotations

from windlass.core.model import Frozen

KEY_BYTES = 32
DEFAULT_PORT = 9998
"""Of a worker."""
EXACT, INT8 = "exact", "int8"
SYNCS = (EXACT, INT8)


class Meeting(Frozen):
    """Travels only on authenticated channels: whoever has the key is one of the ranks."""

    key: bytes
    """Random, of this epoch alone."""
    hosts: tuple[str, ...]
    """Of each rank: the address that others reach it at."""
    machines: tuple[int, ...]
    """Of each rank: equal numbers share memory."""
    sync: str = EXACT
    """How sums travel: as they are, or in blocks of int8."""
    transport: str = "auto"
    """auto, links, gloo or nccl."""
