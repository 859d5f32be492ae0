"""When a result is close enough, and where cases are noted."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ROUNDING = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest difference by the largest number: sums in another order; one rounding or two in half precision."""
TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CASES: dict[str, Callable[[str], None]] = {}
LARGE: dict[str, Callable[[str], None]] = {}


def close(mine: Tensor | None, wanted: Tensor, dtype: torch.dtype) -> None:
    assert mine is not None, "the kernel does not take this"
    assert mine.shape == wanted.shape, f"shape {tuple(mine.shape)}, not {tuple(wanted.shape)}"
    assert mine.isfinite().all() or not wanted.isfinite().all(), "not all are numbers"
    difference = (mine.double() - wanted.double()).abs().max().item()
    largest = wanted.double().abs().max().item()
    assert difference <= ROUNDING[dtype] * max(largest, 1e-3), f"off by {difference:.2e} where the largest is {largest:.2e}"


def numbers(seed: int, device: str, dtype: torch.dtype = torch.float32) -> Callable[..., Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=draw).to(device, dtype)


def repeats(operation: Callable[[], Tensor | None], first: Tensor | None) -> None:
    """The same bits every time. The interpreter has no other way, and no time."""
    assert first is not None
    if first.device.type == "cuda":
        for _ in range(3):
            again = operation()
            assert again is not None and torch.equal(first, again), "not the same twice"
