"""What a rank must know to find the others of its epoch. A value; how they connect: runtime/parallel/join.py."""

from __future__ import annotations

from windlass.core.model import Frozen

KEY_BYTES = 32
DEFAULT_PORT = 9998
"""Of `windlass worker`."""
EXACT, INT8 = "exact", "int8"
SYNCS = (EXACT, INT8)


class Meeting(Frozen):
    """Sent only over authenticated channels: the key proves membership."""

    key: bytes
    """Random, new for every epoch."""
    hosts: tuple[str, ...]
    """Address of each rank."""
    machines: tuple[int, ...]
    """Machine of each rank; ranks of one machine share memory."""
    sync: str = EXACT
    """How partial sums are sent: exact, or quantized to int8 blocks."""
    transport: str = "auto"
    """auto, links, gloo or nccl."""
