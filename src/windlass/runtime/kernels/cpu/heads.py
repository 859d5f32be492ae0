"""A matrix per head in C++ (native/attention/heads.cpp)."""

from __future__ import annotations

from torch import Tensor

from windlass.runtime.kernels.cpu.types import STORED, is_plain
from windlass.runtime.kernels.program import program


def heads_matmul(x: Tensor, weight: Tensor) -> Tensor | None:
    if not is_plain(x) or weight.dtype not in STORED or not weight.is_contiguous():
        return None
    rows, heads, depth = x.shape
    width = weight.shape[2]
    result = program.empty((rows, heads, width))
    ints = [heads, depth, width, x.stride(0), x.stride(1), STORED[weight.dtype]]
    program.emit("heads_matmul", [result, x, weight], ints, rows=rows)
    return result
