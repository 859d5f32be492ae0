"""Activations in C++ (native/ops/activate.cpp): within 1e-6 of exact values, relative; GELU's far tail, below 1e-6, within 2e-5."""

from __future__ import annotations

import math

from torch import Tensor

from windlass.core.model import Activation
from windlass.runtime.kernels.cpu.types import is_plain
from windlass.runtime.kernels.program import program

NUMBERS = {Activation.SILU: 0, Activation.GELU: 1, Activation.GELU_TANH: 2, Activation.CLAMPED_SWIGLU: 3}


def activate(x: Tensor, activation: Activation, gated: bool, clamp: float | None = None) -> Tensor | None:
    if x.dim() != 2 or not is_plain(x):
        return None
    rows, width = x.shape[0], x.shape[1] // (2 if gated else 1)
    result = program.empty((rows, width))
    limit = math.inf if clamp is None else clamp
    program.emit("activate", [result, x], [width, x.stride(0), NUMBERS[activation], int(gated)], [limit], rows=rows)
    return result
