"""The precision that references compute in."""

from __future__ import annotations

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """At least fp32: norms, softmaxes and rotations lose too much in half precision. float64 stays (gradcheck)."""
    return x if x.dtype.itemsize >= torch.float32.itemsize else x.float()
