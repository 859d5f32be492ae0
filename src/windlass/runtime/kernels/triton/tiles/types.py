"""Dtypes of the kernels."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from windlass.runtime.kernels.triton.device import interpreted

NAMES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def is_float(*tensors: Tensor | None) -> bool:
    return all(tensor is None or tensor.dtype in NAMES for tensor in tensors)


def products_in(dtype: torch.dtype) -> tl.dtype:
    """The dtype of a product's factors. Triton's interpreter multiplies bf16 as integers."""
    return tl.float32 if interpreted() and dtype == torch.bfloat16 else NAMES[dtype]
