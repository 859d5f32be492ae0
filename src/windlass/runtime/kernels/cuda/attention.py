"""Decode attention over the paged KV cache: rotary embedding, cache write and attention in one kernel, split over the sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.core.constants import BLOCK_TOKENS
from windlass.core.fused import HEAD_DIM
from windlass.runtime.kernels.cuda import driver
from windlass.runtime.kernels.cuda.int8 import RoundedRows

MAX_SPLITS = 64
MAX_CHAINED = 16
"""Rows of one sequence, the newest included."""
SHORT_TOKENS = 512
ROTATED_ROWS, ROTATED_PARTS = 4, 4
"""ROWS and PARTS of rotary.cu."""
FP8_PAGE_BYTES = 2 * BLOCK_TOKENS * (HEAD_DIM + 1)


@dataclass(frozen=True)
class AttentionWorkspace:
    """Partial results of splits. `arrived` is zero between launches."""

    partial: Tensor
    arrived: Tensor


def workspace(
    sequences: int, num_heads: int, num_kv_heads: int, splits: int, device: torch.device | str = "cuda"
) -> AttentionWorkspace:
    size = sequences * num_heads * splits * (HEAD_DIM + 2)
    return AttentionWorkspace(
        partial=torch.empty(size, dtype=torch.float32, device=device),
        arrived=torch.zeros(sequences * num_kv_heads, dtype=torch.int32, device=device),
    )


def shared_bytes(warps: int, depth: int, page_bytes: int = 2 * BLOCK_TOKENS * HEAD_DIM * 2) -> int:
    """`page_bytes`: keys, values and their scales of a head."""
    pages = max(warps * depth * page_bytes, warps * 16 * HEAD_DIM * 4)
    return pages + 16 * 272 + 2 * warps * 16 * 4 + 16 * 64 * 4


TOGETHER = {(8, 2): 1, (8, 1): 2, (4, 2): 3, (4, 1): 4}
"""Blocks on a multiprocessor that registers must suffice for, by warps and pages in flight of each: what shared memory has room for."""


def launch_shape(max_tokens: int, sequences: int, num_kv_heads: int) -> tuple[int, tuple[int, int]]:
    """Number of splits, and warps and pages in flight of each: combining splits costs 2 us, so short sequences are not split.

    Blocks as large as they can be while all are there at once; with more blocks than that, of two sizes the fastest
    (docs/reference/cuda-notes.md, 40)."""
    groups, processors, is_short = sequences * num_kv_heads, driver.num_processors(), max_tokens <= SHORT_TOKENS
    splits = 1 if is_short else max(1, min(processors // groups, -(-max_tokens // 256), MAX_SPLITS))
    if groups <= processors:
        return splits, (8, 2)
    if groups <= 2 * processors and not is_short:
        return splits, (8, 1)
    if groups <= 3 * processors:
        return splits, (4, 2)
    return splits, (4, 1) if groups <= 4 * processors or is_short else (4, 2)


def decode_attention(
    qkv: Tensor, table: Tensor, positions: Tensor, slots: Tensor, lengths: Tensor, blocks: Tensor, keys: Tensor, values: Tensor,
    out: Tensor | RoundedRows, space: AttentionWorkspace, *, scale: float, splits: int, interleaved: bool = False,
    shape: tuple[int, int] | None = None, scales: Tensor | None = None, chained: bool = False,
) -> None:  # fmt: skip
    """qkv bf16 [sequences, (heads + 2 kv heads) * 128], one new token each; out bf16 [sequences, heads * 128], or the same in 8 bits.

    `chained`: rows may be consecutive tokens of a sequence, one after another, up to MAX_CHAINED; each has that sequence's block table.

    keys bf16 [pages, kv heads, 128, 16], values bf16 [pages, kv heads, 16, 128]; table fp32 [positions, 2, rotated dims / 2].
    With `scales` [pages, kv heads, 2, 16] keys and values are fp8, and twice as many pages are in flight.
    """
    num_kv_heads = keys.shape[1]
    heads = qkv.shape[1] // HEAD_DIM // num_kv_heads - 2
    warps, depth = shape = shape or (4, 2)
    fp8 = scales is not None
    if fp8:
        depth *= 2
    shared = shared_bytes(warps, depth, FP8_PAGE_BYTES) if fp8 else shared_bytes(warps, depth)
    run = driver.kernel(
        "attention.cu", "PPPPPPPPPPPPPPIf", shared_bytes=shared, WARPS=warps, DEPTH=depth, TOGETHER=TOGETHER.get(shape, 1), HEADS=heads,
        KV_HEADS=num_kv_heads, ROTARY=2 * table.shape[2], INTERLEAVED=int(interleaved), FP8=int(fp8), CHAINED=MAX_CHAINED if chained else 0,
    )  # fmt: skip
    into = (None, *out) if isinstance(out, RoundedRows) else (out, None, None)
    run(
        (splits, num_kv_heads, qkv.shape[0]), warps * 32, qkv, table, positions, slots, lengths, blocks, keys, values, scales, *into,
        space.partial, space.arrived, blocks.shape[1], scale, shared_bytes=shared,
    )  # fmt: skip


def rotate_store(
    qkv: Tensor, table: Tensor, positions: Tensor, slots: Tensor, keys: Tensor | None, values: Tensor | None, num_kv_heads: int,
    *, interleaved: bool = False, scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """qkv bf16 [rows, (heads + 2 kv heads) * 128]: queries and keys rotated in place, keys and values stored at `slots`, in fp8 with
    `scales`. For prefill."""
    heads = qkv.shape[1] // HEAD_DIM - 2 * num_kv_heads
    run = driver.kernel(
        "rotary.cu",
        "PPPPPPPI",
        packed=False,
        HEADS=heads,
        KV_HEADS=num_kv_heads,
        ROTARY=2 * table.shape[2],
        INTERLEAVED=int(interleaved),
        FP8=int(scales is not None),
    )
    rows = qkv.shape[0]
    run((-(-rows // ROTATED_ROWS), ROTATED_PARTS), 256, qkv, table, positions, slots, keys, values, scales, rows)
    return qkv


def head_norm(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, num_kv_heads: int, eps: float) -> Tensor:
    """An rms norm over each head of queries and keys of qkv bf16 [rows, (heads + 2 kv heads) * 128], in place; norms fp32 [128]."""
    heads = qkv.shape[1] // HEAD_DIM - 2 * num_kv_heads
    run = driver.kernel(
        "rotary.cu", "PPPf", "head_norm", packed=False, HEADS=heads, KV_HEADS=num_kv_heads, ROTARY=HEAD_DIM, INTERLEAVED=0, FP8=0
    )
    run((qkv.shape[0], 4 if qkv.shape[0] <= 64 else 1), 256, qkv, q_norm, k_norm, eps)
    return qkv
