"""Softmax attention over the paged KV cache, or over the keys and values of the batch itself. The host reads nothing back.

A program handles a tile of rows of one sequence with the query heads of one kv head: queries and heads together are the rows of its
products. It finds its sequence in `starts`. Where there are few tiles, each sequence is split along its tokens (split-KV): the host
chooses the number of splits by the maximum length, the device their bounds by the actual length, and a second kernel combines them in
order. An empty split has no effect.
"""

# ruff: noqa: N803, N806 (compile-time constants are in capitals)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.core.constants import BLOCK_TOKENS
from windlass.runtime.kernels.arguments import AttentionArgs
from windlass.runtime.kernels.triton.device import num_processors
from windlass.runtime.kernels.triton.tiles.fp8 import power
from windlass.runtime.kernels.triton.tiles.types import is_float, products_in

LOG2E = tl.constexpr(1.4426950408889634)
PAGE = tl.constexpr(BLOCK_TOKENS)
SPLIT_TOKENS = 256
"""Minimum tokens of a split."""
MAX_SPLITS = 32


@triton.jit
def _sequence_of(tile, starts, num_sequences, ROWS: tl.constexpr):
    """Binary search for the last sequence whose first tile, starts // ROWS + sequence, is not after `tile`."""
    left: tl.int32 = 0
    right = num_sequences
    while left < right:
        middle = (left + right) // 2
        if tl.load(starts + middle) // ROWS + middle <= tile:
            left = middle + 1
        else:
            right = middle
    return left - 1


@triton.jit(
    do_not_specialize=["num_sequences", "num_rows", "window", "splits"],
    # A part of a step may begin at any row: without this, each alignment would be compiled when it first occurs.
    do_not_specialize_on_alignment=["q", "positions", "starts", "lengths", "table"],
)
def _attend(
    result, stats, q, keys, values, scales, positions, starts, lengths, table, sinks, slopes, scale, window,
    num_sequences, num_rows, num_heads,
    q_row, q_head, k_page, k_head, k_dim, k_token, v_page, v_head, v_token, s_page, s_head, s_side, table_row, splits,
    GROUP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    SIZE_1: tl.constexpr, SIZE_2: tl.constexpr, BLOCK_1: tl.constexpr, BLOCK_2: tl.constexpr, VALUES: tl.constexpr,
    SINGLE: tl.constexpr, PAGED: tl.constexpr, LATENT: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """A head's dimensions are handled in two parts, each padded to a power of two: SIZE_1 in BLOCK_1 and SIZE_2 (may be 0) in BLOCK_2."""
    HEAD_BLOCKS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    if SINGLE:
        sequence = tl.program_id(0)
        first_row = sequence
        tile_row = sequence
        end_row = sequence + 1
    else:
        sequence = _sequence_of(tl.program_id(0), starts, num_sequences, ROWS)
        first_row = tl.load(starts + sequence)
        end_row = tl.load(starts + sequence + 1)
        tile_row = first_row + (tl.program_id(0) - (first_row // ROWS + sequence)) * ROWS
    if tile_row >= end_row:
        return
    kv_head = tl.program_id(1) // HEAD_BLOCKS
    number = tl.arange(0, BLOCK)
    row = tile_row + number // HEADS
    of_group = tl.program_id(1) % HEAD_BLOCKS * HEADS + number % HEADS
    head = kv_head * GROUP + of_group
    valid = (number // HEADS < ROWS) & (row < end_row) & (of_group < GROUP)
    position = tl.load(positions + row, mask=valid, other=-1)
    last = tl.load(positions + tl.minimum(tile_row + ROWS, end_row) - 1)
    if PAGED:
        stop = tl.minimum(last + 1, tl.load(lengths + sequence))
    else:  # tokens are counted from the sequence's first
        origin = tl.load(positions + first_row)
        position = tl.where(valid, position - origin, -1)
        stop = last - origin + 1
    begin = 0
    if WINDOW:
        nearest = tl.load(positions + tile_row) - window + 1
        if not PAGED:
            nearest -= origin
        begin = tl.maximum(nearest, 0) // PAGE * PAGE
    end = stop
    if SPLIT:
        span = tl.cdiv(tl.cdiv(tl.maximum(stop - begin, 0), TOKENS), splits) * TOKENS
        begin += tl.program_id(2) * span
        end = tl.minimum(stop, begin + span)

    part_1 = tl.arange(0, BLOCK_1)
    part_2 = tl.arange(0, BLOCK_2)
    q_at = q + row.to(tl.int64)[:, None] * q_row + head[:, None] * q_head
    q_1 = tl.load(q_at + part_1[None, :], mask=valid[:, None] & (part_1 < SIZE_1)[None, :], other=0).to(TYPE)
    if SIZE_2 > 0:
        q_2 = tl.load(q_at + SIZE_1 + part_2[None, :], mask=valid[:, None] & (part_2 < SIZE_2)[None, :], other=0).to(TYPE)
    if slopes is not None:
        slope = tl.load(slopes + head, mask=valid, other=0).to(tl.float32) * LOG2E
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    mixed_1 = tl.zeros((BLOCK, BLOCK_1), tl.float32)
    mixed_2 = tl.zeros((BLOCK, BLOCK_2), tl.float32)
    for start in range(begin, end, TOKENS):
        token = start + tl.arange(0, TOKENS)
        inside = token < stop
        if PAGED:
            # Whole pages, so that loads are contiguous; scores beyond the end are masked below.
            whole = token // PAGE * PAGE < stop
            page = tl.load(table + sequence.to(tl.int64) * table_row + token // PAGE, mask=whole, other=0).to(tl.int64)
            k_at = keys + kv_head * k_head + page * k_page + token % PAGE * k_token
            v_at = values + kv_head * v_head + page * v_page + token % PAGE * v_token
            if scales is not None:
                s_at = scales + kv_head * s_head + page * s_page + token % PAGE
                k_power = power(tl.load(s_at, mask=whole, other=0))
        else:
            whole = inside
            page = (first_row + token).to(tl.int64)
            k_at = keys + kv_head * k_head + page * k_page
            v_at = values + kv_head * v_head + page * v_page
        if LATENT:  # keys are values too: uninitialized memory must not be multiplied, even by zero
            whole = inside
        k_1 = tl.load(k_at[None, :] + part_1[:, None] * k_dim, mask=whole[None, :] & (part_1 < SIZE_1)[:, None], other=0.0)
        if scales is not None:
            k_1 = k_1.to(tl.float32) * k_power[None, :]
        k_1 = k_1.to(TYPE)
        scores = tl.dot(q_1, k_1, input_precision="ieee")
        if SIZE_2 > 0:
            k_2 = tl.load(
                k_at[None, :] + (SIZE_1 + part_2)[:, None] * k_dim, mask=whole[None, :] & (part_2 < SIZE_2)[:, None], other=0.0
            )
            if scales is not None:
                k_2 = k_2.to(tl.float32) * k_power[None, :]
            scores = tl.dot(q_2, k_2.to(TYPE), scores, input_precision="ieee")
        scores *= scale * LOG2E
        distance = position[:, None] - token[None, :]
        if slopes is not None:
            scores -= slope[:, None] * distance
        seen = (distance >= 0) & inside[None, :]
        if WINDOW:
            seen &= distance < window
        scores = tl.where(seen, scores, float("-inf"))
        now = tl.maximum(most, tl.max(scores, 1))
        level = tl.where(now == float("-inf"), 0.0, now)
        shares = tl.exp2(scores - level[:, None])
        fade = tl.exp2(most - level)
        most = now
        total = total * fade + tl.sum(shares, 1)
        shares = shares.to(TYPE)
        mixed_1 = mixed_1 * fade[:, None]
        if LATENT:
            mixed_1 = tl.dot(shares, tl.trans(k_1), mixed_1, input_precision="ieee")
        else:
            v_1 = tl.load(v_at[:, None] + part_1[None, :], mask=inside[:, None] & (part_1 < SIZE_1)[None, :], other=0.0)
            if scales is not None:
                v_power = power(tl.load(s_at + s_side, mask=inside, other=0))
                v_1 = v_1.to(tl.float32) * v_power[:, None]
            mixed_1 = tl.dot(shares, v_1.to(TYPE), mixed_1, input_precision="ieee")
            if SIZE_2 > 0:
                v_2 = tl.load(
                    v_at[:, None] + SIZE_1 + part_2[None, :], mask=inside[:, None] & (part_2 < SIZE_2)[None, :], other=0.0
                )
                if scales is not None:
                    v_2 = v_2.to(tl.float32) * v_power[:, None]
                mixed_2 = tl.dot(shares, v_2.to(TYPE), mixed_2 * fade[:, None], input_precision="ieee")

    at = row.to(tl.int64) * num_heads + head
    if SPLIT:
        at += tl.program_id(2).to(tl.int64) * num_rows * num_heads
        tl.store(stats + 2 * at, most, mask=valid)
        tl.store(stats + 2 * at + 1, total, mask=valid)
    else:
        if sinks is not None:
            sink = tl.load(sinks + head, mask=valid, other=0).to(tl.float32) * LOG2E
            now = tl.maximum(most, sink)
            fade = tl.exp2(most - now)
            total = total * fade + tl.exp2(sink - now)
            mixed_1 *= fade[:, None]
            mixed_2 *= fade[:, None]
        total = tl.where(total == 0, 1.0, total)
        mixed_1 /= total[:, None]
        mixed_2 /= total[:, None]
    to = result + at[:, None] * VALUES
    kind = result.dtype.element_ty
    tl.store(to + part_1[None, :], mixed_1.to(kind), mask=valid[:, None] & (part_1 < SIZE_1)[None, :])
    if SIZE_2 > 0 and not LATENT:
        tl.store(to + SIZE_1 + part_2[None, :], mixed_2.to(kind), mask=valid[:, None] & (part_2 < SIZE_2)[None, :])


@triton.jit(do_not_specialize=["num_rows", "splits"])
def _join(
    result, parts, stats, sinks, num_rows, num_heads, splits,
    VALUES: tl.constexpr, BLOCK: tl.constexpr, SPLITS_BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    at = tl.program_id(0).to(tl.int64) * num_heads + head
    split = tl.arange(0, SPLITS_BLOCK)
    part = tl.arange(0, BLOCK)
    there = split < splits
    from_ = at + split.to(tl.int64) * num_rows * num_heads
    most = tl.load(stats + 2 * from_, mask=there, other=float("-inf"))
    total = tl.load(stats + 2 * from_ + 1, mask=there, other=0)
    mixed = tl.load(parts + from_[:, None] * VALUES + part[None, :], mask=there[:, None] & (part < VALUES)[None, :], other=0)
    level = tl.max(most, 0)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        level = tl.maximum(level, sink)
    level = tl.where(level == float("-inf"), 0.0, level)
    share = tl.exp2(most - level)
    whole = tl.sum(total * share, 0)
    if sinks is not None:
        whole += tl.exp2(sink - level)
    made = tl.sum(mixed * share[:, None], 0) / tl.where(whole == 0, 1.0, whole)
    tl.store(result + at * VALUES + part, made.to(result.dtype.element_ty), mask=part < VALUES)


@dataclass(frozen=True)
class _Shape:
    """Tile sizes and grid, from what the host knows."""

    group: int
    heads: int
    rows: int
    block: int
    tokens: int
    sizes: tuple[int, int]
    blocks: tuple[int, int]
    tiles: int
    splits: int
    num_warps: int

    @property
    def head_blocks(self) -> int:
        return triton.cdiv(self.group, self.heads)


def attention(args: AttentionArgs) -> Tensor | None:
    q, k, v, step, cache = args[:5]
    if not is_float(q, k, v, args.sinks, args.slopes) or q.dim() != 3 or q.stride(2) != 1 or (cache is None and v.stride(2) != 1):
        return None
    keys, values = (k, v) if cache is None else (cache.keys, cache.keys if cache.values is None else cache.values)
    latent = 0 if cache is None else cache.latent_values
    if not latent and q.shape[2] != (v.shape[2] if cache is None else values.shape[3]):
        latent = v.shape[2] if cache is None else 0
        if not latent or v.data_ptr() != k.data_ptr():  # values narrower than keys must be a prefix of the keys
            return None
    width = latent or q.shape[2]
    rows, heads = int(step.counts[0]), q.shape[1]
    result = torch.empty((q.shape[0], heads * width), dtype=q.dtype, device=q.device)
    if rows:
        _run(result, keys, values, args, _shaped(args, keys, latent), width)
    return result


def _run(result: Tensor, keys: Tensor, values: Tensor, args: AttentionArgs, shape: _Shape, width: int) -> None:
    q, step, cache, window = args.q, args.step, args.cache, args.window
    rows, sequences, _ = step.counts.tolist()
    (num_rows, heads, _), splits = q.shape, shape.splits
    parts = result if splits == 1 else torch.empty((splits, num_rows, heads, width), dtype=torch.float32, device=q.device)
    stats = None if splits == 1 else torch.empty((splits, num_rows, heads, 2), dtype=torch.float32, device=q.device)
    latent = width != q.shape[2]
    if cache is None:
        strides = (keys.stride(0), keys.stride(1), keys.stride(2), 0, values.stride(0), values.stride(1), 0)
    elif cache.values is None:
        strides = (keys.stride(0), keys.stride(1), 1, keys.stride(2), keys.stride(0), keys.stride(1), keys.stride(2))
    else:
        strides = (*keys.stride(), *values.stride()[:3])
    scales = None if cache is None else cache.scales
    strides += (0, 0, 0) if scales is None else scales.stride()[:3]
    # What fp8 stands for is exact in bf16.
    product_type = q.dtype if scales is not None else torch.promote_types(q.dtype, keys.dtype)
    _attend[(shape.tiles, heads // shape.group * shape.head_blocks, splits)](
        parts, stats, q, keys, values, scales, step.positions, step.starts, step.lengths, step.blocks, args.sinks, args.slopes, args.scale,
        window or 0, sequences, num_rows, heads, q.stride(0), q.stride(1), *strides, step.blocks.stride(0), splits,
        GROUP=shape.group, HEADS=shape.heads, ROWS=shape.rows, BLOCK=shape.block, TOKENS=shape.tokens,
        SIZE_1=shape.sizes[0], SIZE_2=shape.sizes[1], BLOCK_1=shape.blocks[0], BLOCK_2=shape.blocks[1], VALUES=width,
        SINGLE=rows == sequences, PAGED=cache is not None, LATENT=latent, WINDOW=window is not None, SPLIT=splits > 1,
        TYPE=products_in(product_type), num_warps=shape.num_warps, num_stages=2,
    )  # fmt: skip
    if stats is not None:
        _join[(rows, heads)](
            result, parts, stats, args.sinks, num_rows, heads, splits,
            VALUES=width, BLOCK=triton.next_power_of_2(width), SPLITS_BLOCK=MAX_SPLITS, num_warps=8 if width > 256 else 4,
        )  # fmt: skip


def _shaped(args: AttentionArgs, keys: Tensor, latent: int) -> _Shape:
    q, step, cache, window = args.q, args.step, args.cache, args.window
    rows, sequences, _ = step.counts.tolist()
    exact = torch.float32 in (q.dtype, keys.dtype)
    group = q.shape[1] // keys.shape[1]
    sizes = _parts(q.shape[2], latent)
    wide = max(16, triton.next_power_of_2(sizes[0]))
    single = rows == sequences
    # Queries times heads, and tokens per iteration: what registers and 99 KB of shared memory hold.
    # Triton 3.6 on Hopper gives wrong results where 64 rows are multiplied with keys in two parts that do not come from memory as they are:
    # codes of fp8, and rows that no page aligns.
    is_wrong_in_64 = sizes[1] > 0 and (cache is None or cache.scales is not None)
    most = 16 if exact else 64 if wide <= 128 and not is_wrong_in_64 else 32
    block = max(16, min(most, triton.next_power_of_2(group))) if single else most
    tokens = 32 if exact or wide > 128 else 64
    heads = min(group, block)
    tile_rows = 1 if single else block // heads
    tiles = sequences if single else rows // tile_rows + sequences
    programs = tiles * keys.shape[1] * triton.cdiv(group, heads)
    longest = 0 if cache is None else step.blocks.shape[1] * BLOCK_TOKENS
    if window is not None:
        longest = min(longest, window)
    splits = min(2 * num_processors(q.device) // programs, longest // SPLIT_TOKENS, MAX_SPLITS)
    second = max(16, triton.next_power_of_2(sizes[1])) if sizes[1] else 16
    return _Shape(
        group=group, heads=heads, rows=tile_rows, block=block, tokens=tokens, sizes=sizes, blocks=(wide, second), tiles=tiles,
        splits=max(1, splits), num_warps=8 if wide >= 256 else 4,
    )  # fmt: skip


def _parts(dim: int, latent: int) -> tuple[int, int]:
    """The largest power of two and the rest (80 is 64 + 16); of a latent cache, the values and the rest."""
    if latent:
        return latent, dim - latent
    first = 1 << (dim.bit_length() - 1)
    return (first, dim - first) if first >= 16 else (dim, 0)
