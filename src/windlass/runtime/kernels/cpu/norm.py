"""Norms and sums in C++ (native/ops/norm.cpp)."""

from __future__ import annotations

from torch import Tensor

from windlass.runtime.kernels.cpu.types import is_plain
from windlass.runtime.kernels.program import program


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: str) -> Tensor | None:
    rms = kind == "rms"
    if x.dim() != 2 or not is_plain(x, weight, bias) or (rms and bias is not None):
        return None
    rows, width = x.shape
    result = program.empty((rows, width))
    program.emit("norm", [result, x, weight, bias], [width, x.stride(0), int(not rms)], [eps], rows=rows)
    return result


def add(x: Tensor, y: Tensor) -> Tensor | None:
    if x.dim() != 2 or x.shape != y.shape or not is_plain(x, y):
        return None
    rows, width = x.shape
    result = program.empty((rows, width))
    program.emit("add", [result, x, y], [width, x.stride(0), y.stride(0)], rows=rows)
    return result
