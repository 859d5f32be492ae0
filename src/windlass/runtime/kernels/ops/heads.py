"""A small matrix per head: latent attention's projections between heads and the latent."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.runtime.kernels.cpu import heads as native_heads
from windlass.runtime.kernels.program import program
from windlass.runtime.kernels.triton import available


def heads_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, heads, a] @ weight [heads, a, b] -> [rows, heads, b]. x may be a slice of wider heads."""
    result = native_heads.heads_matmul(x, weight) if program.usable(x, weight) else None
    if result is None and (gpu := available.kernels(x, weight)):
        result = gpu.heads_matmul(x, weight)
    return reference(x, weight) if result is None else result


def reference(x: Tensor, weight: Tensor) -> Tensor:
    kind = torch.promote_types(x.dtype, weight.dtype)
    return torch.einsum("rha,hab->rhb", x.to(kind), weight.to(kind)).to(x.dtype).contiguous()
