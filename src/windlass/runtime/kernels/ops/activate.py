"""Activation functions of a feed-forward, gated or not."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from windlass.core.model import Activation
from windlass.runtime.kernels.constants import CLAMPED_SWIGLU_SLOPE
from windlass.runtime.kernels.cpu import activate as native_activate
from windlass.runtime.kernels.program import program
from windlass.runtime.kernels.torch_compile import chain
from windlass.runtime.kernels.triton import available


def activate(x: Tensor, activation: Activation, gated: bool, clamp: float | None = None) -> Tensor:
    """`gated`: the first half of x is activated and multiplied with the second. `clamp` limits both halves first."""
    result = native_activate.activate(x, activation, gated, clamp) if program.usable(x) else None
    if result is None and (gpu := available.kernels(x)):
        result = gpu.activate(x, activation, gated, clamp)
    return _chained(x, activation, gated, clamp) if result is None else result


def reference(x: Tensor, activation: Activation, gated: bool, clamp: float | None = None) -> Tensor:
    if not gated:
        return _activated(x, activation)
    gate, up = x.chunk(2, dim=-1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return _activated(gate, activation) * (up + 1 if activation is Activation.CLAMPED_SWIGLU else up)


def _activated(x: Tensor, activation: Activation) -> Tensor:
    match activation:
        case Activation.SILU:
            return functional.silu(x)
        case Activation.GELU:
            return functional.gelu(x)
        case Activation.GELU_TANH:
            return functional.gelu(x, approximate="tanh")
        case Activation.CLAMPED_SWIGLU:
            return x * (CLAMPED_SWIGLU_SLOPE * x).sigmoid()


_chained = chain(reference)
