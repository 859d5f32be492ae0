"""Builds the queries and keys of latent attention and writes the KV cache in one kernel, a program per row and head."""

# ruff: noqa: N803 (compile-time constants are in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.core.constants import BLOCK_TOKENS
from windlass.runtime.kernels.arguments import LatentArgs
from windlass.runtime.kernels.triton.tiles.fp8 import coded, scale_for
from windlass.runtime.kernels.triton.tiles.rotate import partners, turned
from windlass.runtime.kernels.triton.tiles.types import is_float

PAGE = tl.constexpr(BLOCK_TOKENS)


@triton.jit
def _join(
    queries, keys, absorbed, q, kv, norm, table, positions, cached, scales, slots, eps, absorbed_row, absorbed_head, q_row, q_head, kv_row,
    page_stride, token_stride,
    HEADS: tl.constexpr, LATENT: tl.constexpr, BEFORE: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """The program after the last head's computes the key."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < LATENT
    turn = tl.arange(0, TURNS)
    turns = turn < 2 * HALF
    other, angle, is_first = partners(turn, HALF, INTERLEAVED)
    if head < HEADS:
        numbers = tl.load(absorbed + row * absorbed_row + head * absorbed_head + at, mask=inside, other=0)
        source = q + row * q_row + head * q_head + BEFORE
        to = queries + (row * HEADS + head) * (LATENT + 2 * HALF)
    else:
        numbers = tl.load(kv + row * kv_row + at, mask=inside, other=0)
        wide = numbers.to(tl.float32)
        wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / LATENT + eps)
        numbers = (wide * tl.load(norm + at, mask=inside, other=0).to(tl.float32)).to(absorbed.dtype.element_ty)
        source = kv + row * kv_row + LATENT
        to = keys + row * (LATENT + 2 * HALF)
    first = tl.load(source + turn, mask=turns, other=0).to(tl.float32)
    second = tl.load(source + other, mask=turns, other=0).to(tl.float32)
    rotated = turned(first, second, table, tl.load(positions + row), angle, is_first, turns, HALF)
    rotated = rotated.to(absorbed.dtype.element_ty)
    tl.store(to + at, numbers, mask=inside)
    tl.store(to + LATENT + turn, rotated, mask=turns)
    if cached is not None and head == HEADS:
        slot = tl.load(slots + row).to(tl.int64)
        into = cached + slot // PAGE * page_stride + slot % PAGE * token_stride
        if scales is not None:  # a page of them is PAGE bytes
            first_part, second_part = numbers.to(tl.float32), tl.where(turns, rotated.to(tl.float32), 0.0)
            scale = scale_for(tl.maximum(tl.max(tl.abs(first_part), 0), tl.max(tl.abs(second_part), 0)))
            tl.store(scales + slot, scale.to(tl.uint8), mask=slot >= 0)
            first_stored, second_stored = coded(first_part, scale), coded(second_part, scale)
        else:
            first_stored, second_stored = numbers, rotated
        tl.store(into + at, first_stored.to(cached.dtype.element_ty), mask=(inside & (slot >= 0)).to(tl.int1))
        tl.store(into + LATENT + turn, second_stored.to(cached.dtype.element_ty), mask=(turns & (slot >= 0)).to(tl.int1))


def join_latent(args: LatentArgs) -> tuple[Tensor, Tensor] | None:
    absorbed, q, kv, norm, table, cache = args.absorbed, args.q, args.kv, args.norm, args.table, args.cache
    if not is_float(absorbed, q, kv, norm, table) or not absorbed.dtype == q.dtype == kv.dtype:
        return None
    if absorbed.stride(2) != 1 or q.stride(2) != 1 or kv.stride(1) != 1 or (cache is not None and cache.values is not None):
        return None
    rows, heads, latent = absorbed.shape
    half = table.shape[-1]
    width = latent + 2 * half
    queries = torch.empty((rows, heads, width), dtype=absorbed.dtype, device=absorbed.device)
    keys = torch.empty((rows, 1, width), dtype=absorbed.dtype, device=absorbed.device)
    strides = (0, 0) if cache is None else (cache.keys.stride(0), cache.keys.stride(2))
    if rows:
        _join[(rows, heads + 1)](
            queries, keys, absorbed, q, kv, norm, table, args.positions, None if cache is None else cache.keys,
            None if cache is None else cache.scales, args.slots, args.eps,
            absorbed.stride(0), absorbed.stride(1), q.stride(0), q.stride(1), kv.stride(0), *strides,
            HEADS=heads, LATENT=latent, BEFORE=q.shape[2] - 2 * half, HALF=half, INTERLEAVED=args.interleaved,
            BLOCK=triton.next_power_of_2(latent), TURNS=triton.next_power_of_2(2 * half), num_warps=2,
        )  # fmt: skip
    return queries, keys
