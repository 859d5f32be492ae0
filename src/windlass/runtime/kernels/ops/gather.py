"""Row selection: the rows whose logits are needed."""

from __future__ import annotations

from torch import Tensor

from windlass.runtime.kernels.cpu import gather as native_gather
from windlass.runtime.kernels.program import program
from windlass.runtime.kernels.triton import available


def gather(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows]."""
    result = native_gather.gather(x, rows) if program.usable(x, rows) else None
    if result is None and (gpu := available.kernels(x, rows)):
        result = gpu.gather(x, rows)
    return reference(x, rows) if result is None else result


def reference(x: Tensor, rows: Tensor) -> Tensor:
    return x[rows.long()]
