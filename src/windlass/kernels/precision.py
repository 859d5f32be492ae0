"""In which type the references compute."""

from __future__ import annotations

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """At least fp32: statistics, softmaxes and rotations lose too much in half precision. What is wider stays so (gradcheck)."""
    return x if x.dtype.itemsize >= torch.float32.itemsize else x.float()
