"""Splits the fused QKV projection: norms, rotary embedding and KV cache write in one kernel, a program per row and head."""

# ruff: noqa: N803 (compile-time constants are in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.core.constants import BLOCK_TOKENS
from windlass.runtime.kernels.arguments import QkvArgs
from windlass.runtime.kernels.triton.tiles.fp8 import coded, scale_for
from windlass.runtime.kernels.triton.tiles.rotate import partners, turned
from windlass.runtime.kernels.triton.tiles.types import is_float

PAGE = tl.constexpr(BLOCK_TOKENS)


@triton.jit
def _weight(q_norm, k_norm, head, at, inside, HEADS: tl.constexpr):
    if head < HEADS:
        found = tl.load(q_norm + at, mask=inside, other=0)
    else:
        found = tl.load(k_norm + at, mask=inside, other=0)
    return found.to(tl.float32)


@triton.jit
def _split(
    result, qkv, q_norm, k_norm, table, positions, keys, values, scales, slots, eps, qkv_stride,
    k_page, k_head, k_dim, k_token, v_page, v_head, v_token, s_page, s_head, s_side,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < DIM
    kind = qkv.dtype.element_ty
    base = qkv + row * qkv_stride + head * DIM
    numbers = tl.load(base + at, mask=inside, other=0)
    if head < HEADS + KV_HEADS:
        made = numbers.to(tl.float32)
        if HALF > 0:
            turns = at < 2 * HALF
            other, angle, is_first = partners(at, HALF, INTERLEAVED)
            others = tl.load(base + other, mask=turns, other=0).to(tl.float32)
        if q_norm is not None:
            root = tl.rsqrt(tl.sum(made * made, 0) / DIM + eps)
            # Rounded where the reference rounds, so that what is cached is the same.
            made = (made * root * _weight(q_norm, k_norm, head, at, inside, HEADS)).to(kind).to(tl.float32)
            if HALF > 0:
                others = (others * root * _weight(q_norm, k_norm, head, other, turns, HEADS)).to(kind).to(tl.float32)
        if HALF > 0:
            made = tl.where(turns, turned(made, others, table, tl.load(positions + row), angle, is_first, turns, HALF), made)
        numbers = made.to(kind)
        tl.store(result + (row * (HEADS + KV_HEADS) + head) * DIM + at, numbers, mask=inside)
    if keys is not None and head >= HEADS:
        slot = tl.load(slots + row).to(tl.int64)
        there = (inside & (slot >= 0)).to(tl.int1)
        if scales is not None:
            wide = numbers.to(tl.float32)
            scale = scale_for(tl.max(tl.abs(wide), 0))
            of = (head - HEADS) % KV_HEADS * s_head + (head - HEADS) // KV_HEADS * s_side
            tl.store(scales + slot // PAGE * s_page + of + slot % PAGE, scale.to(tl.uint8), mask=slot >= 0)
            to_store = coded(wide, scale)
        else:
            to_store = numbers
        if head < HEADS + KV_HEADS:
            to = keys + slot // PAGE * k_page + (head - HEADS) * k_head + slot % PAGE * k_token + at * k_dim
            tl.store(to, to_store.to(keys.dtype.element_ty), mask=there)
        else:
            to = values + slot // PAGE * v_page + (head - HEADS - KV_HEADS) * v_head + slot % PAGE * v_token + at
            tl.store(to, to_store.to(values.dtype.element_ty), mask=there)


def split_qkv(args: QkvArgs) -> tuple[Tensor, Tensor, Tensor] | None:
    """Values are a view of `qkv`. A row whose slot is negative is not stored."""
    qkv, num_heads, num_kv_heads, head_dim = args[:4]
    table, cache, norms = args.table, args.cache, args.norms
    if not is_float(qkv, table, *(norms or ())) or qkv.stride(1) != 1 or (cache is not None and cache.values is None):
        return None
    rows, turning = qkv.shape[0], num_heads + num_kv_heads
    made = torch.empty((rows, turning, head_dim), dtype=qkv.dtype, device=qkv.device)
    values = qkv[:, turning * head_dim :].unflatten(1, (num_kv_heads, head_dim))
    heads = turning if cache is None else turning + num_kv_heads
    q_norm, k_norm = norms or (None, None)
    places = (None, None, None, None) if cache is None else (cache.keys, cache.values, cache.scales, args.slots)
    strides = (0,) * 7 if cache is None else (*cache.keys.stride(), *cache.values.stride()[:3])
    strides += (0, 0, 0) if cache is None or cache.scales is None else cache.scales.stride()[:3]
    if rows:
        _split[(rows, heads)](
            made, qkv, q_norm, k_norm, table, args.positions, *places, args.eps, qkv.stride(0), *strides,
            HEADS=num_heads, KV_HEADS=num_kv_heads, DIM=head_dim, HALF=0 if table is None else table.shape[-1],
            INTERLEAVED=args.interleaved, BLOCK=triton.next_power_of_2(head_dim), num_warps=1,
        )  # fmt: skip
    return made[:, :num_heads], made[:, num_heads:], values
