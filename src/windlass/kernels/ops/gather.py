"""Some of the rows: those whose logits are wanted."""

from __future__ import annotations

from torch import Tensor

from windlass.kernels.cpu import gather as native_gather
from windlass.kernels.program import program
from windlass.kernels.triton import available


def gather(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows]."""
    made = native_gather.gather(x, rows) if program.usable(x, rows) else None
    if made is None and (gpu := available.kernels(x, rows)):
        made = gpu.gather(x, rows)
    return reference(x, rows) if made is None else made


def reference(x: Tensor, rows: Tensor) -> Tensor:
    return x[rows.long()]
