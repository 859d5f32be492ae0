"""Bucketed all-reduce of gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

BUCKET_ELEMENTS = 2**26


def gradient_of(parameter: Tensor) -> Tensor:
    """Zeros if there is none, so that all ranks reduce the same tensors."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def all_reduce_gradients(gradients: list[Tensor], group: Any) -> None:
    """In buckets."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        bucket.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
        if sum(one.numel() for one in bucket) >= BUCKET_ELEMENTS:
            _all_reduce_bucket(bucket, group)
            bucket = []
    _all_reduce_bucket(bucket, group)


def _all_reduce_bucket(bucket: list[Tensor], group: Any) -> None:
    for dtype in dict.fromkeys(one.dtype for one in bucket):
        some = [one for one in bucket if one.dtype == dtype]
        flat = torch.cat([one.flatten() for one in some])
        dist.all_reduce(flat, group=group)
        for one, summed in zip(some, flat.split([one.numel() for one in some]), strict=True):
            one.copy_(summed.view(one.shape))
