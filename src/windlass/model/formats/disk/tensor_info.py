"""Where one tensor lies in a file: name, dtype, shape and bytes. What headers are read into and `disk.reader` reads from."""

from __future__ import annotations

from pathlib import Path

from windlass.core.model import Frozen


class TensorInfo(Frozen, gc=False):  # a checkpoint has tens of thousands, and they hold no cycles
    name: str
    dtype: str
    """As safetensors spells it."""
    shape: tuple[int, ...]
    file: Path
    start: int
    """Byte offset in the file."""
    num_bytes: int
