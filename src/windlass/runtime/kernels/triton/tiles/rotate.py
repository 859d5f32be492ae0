"""Rotary embedding of a head's first dimensions, inlined in other kernels."""

# ruff: noqa: N803 (compile-time constants are in capitals)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def partners(at, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """For each of 2 * HALF dimensions: its partner, its angle, and whether it is the first of the pair."""
    if INTERLEAVED:
        other = at ^ 1
        angle = at // 2
        is_first = at % 2 == 0
    else:
        is_first = at < HALF
        other = tl.where(is_first, at + HALF, at - HALF)
        angle = tl.where(is_first, at, at - HALF)
    return other, angle, is_first


@triton.jit
def turned(numbers, others, table, position, angle, is_first, inside, HALF: tl.constexpr):
    """`numbers` and their partners, by the angles of a position; `table` is [positions, 2, HALF]."""
    at = table + position.to(tl.int64) * 2 * HALF + angle
    cos = tl.load(at, mask=inside, other=1).to(tl.float32)
    sin = tl.load(at + HALF, mask=inside, other=0).to(tl.float32)
    return numbers * cos + tl.where(is_first, -others, others) * sin
