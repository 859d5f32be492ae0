"""Norms over the last dimension, and the sum of two activations."""

from __future__ import annotations

from torch import Tensor

from windlass.runtime.kernels.cpu import norm as native_norm
from windlass.runtime.kernels.precision import widened
from windlass.runtime.kernels.program import program
from windlass.runtime.kernels.torch_compile import chain
from windlass.runtime.kernels.triton import available


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: str) -> Tensor:
    """`rms` divides each row by its root mean square (arXiv 1910.07467); `layer` subtracts the mean first (arXiv 1607.06450)."""
    result = native_norm.norm(x, weight, bias, eps, kind) if program.usable(x, weight, bias) else None
    if result is None and (gpu := available.kernels(x, weight, bias)):
        result = gpu.norm(x, weight, bias, eps, kind)
    return _chained(x, weight, bias, eps, kind) if result is None else result


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: str) -> Tensor:
    wide = widened(x)
    if kind == "layer":
        wide = wide - wide.mean(-1, keepdim=True)
    scaled = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
    return (scaled if bias is None else scaled + bias).to(x.dtype)


_chained = chain(reference)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Plain PyTorch, for references of fused operations."""
    return reference(x, weight, None, eps, "rms")


def add(x: Tensor, y: Tensor) -> Tensor:
    result = native_norm.add(x, y) if program.usable(x, y) else None
    return add_reference(x, y) if result is None else result


def add_reference(x: Tensor, y: Tensor) -> Tensor:
    return x + y
