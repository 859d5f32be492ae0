"""Dtype codes of native operations, and their requirements on tensors."""

from __future__ import annotations

import torch
from torch import Tensor

STORED = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""As StoredType in native/simd/lanes.h numbers them."""
CACHED = {torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 3}
"""Of a KV cache, likewise."""


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether all are fp32 with stride 1 in the last dimension."""
    return all(tensor is None or (tensor.dtype == torch.float32 and tensor.stride(-1) == 1) for tensor in tensors)


def is_index(*tensors: Tensor | None) -> bool:
    return all(tensor is None or (tensor.dtype == torch.int32 and tensor.is_contiguous()) for tensor in tensors)
