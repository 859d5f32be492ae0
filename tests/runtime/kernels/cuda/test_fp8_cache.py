"""Keys and values in fp8 on a GPU: kernels store the codes of the reference (runtime/kernels/fp8_cache.py) and read what it reads."""

from __future__ import annotations

import math
import sys
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import Tensor

if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))

from cuda_references import rotate_reference

from windlass.core.constants import BLOCK_TOKENS
from windlass.runtime.kernels.arguments import AttentionArgs, QkvArgs
from windlass.runtime.kernels.cuda import attention
from windlass.runtime.kernels.ops.attention import reference
from windlass.runtime.kernels.step import KvCache, Step, attention_cache

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

DIM, KV_HEADS, FP8 = 128, 8, torch.float8_e4m3fn
SCALE = 1 / math.sqrt(DIM)


def step_of(sequences: list[tuple[int, int]]) -> Step:
    """(tokens in all, of them new) of each; their blocks are mixed."""
    pages = [-(-length // BLOCK_TOKENS) for length, _ in sequences]
    order = torch.randperm(sum(pages)).to(torch.int32)
    blocks = torch.zeros(len(sequences), max(pages), dtype=torch.int32)
    for row, count in enumerate(pages):
        blocks[row, :count] = order[sum(pages[:row]) :][:count]
    positions = [at for length, new in sequences for at in range(length - new, length)]
    slots = [
        int(blocks[row, at // BLOCK_TOKENS]) * BLOCK_TOKENS + at % BLOCK_TOKENS
        for row, (length, new) in enumerate(sequences)
        for at in range(length - new, length)
    ]
    starts = torch.tensor(list(accumulate((new for _, new in sequences), initial=0)), dtype=torch.int32)
    lengths = torch.tensor([length for length, _ in sequences], dtype=torch.int32)

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    return Step(
        tokens=ints([0] * len(positions)), positions=ints(positions), slots=ints(slots), starts=starts.cuda(), lengths=lengths.cuda(),
        blocks=blocks.cuda(), logit_rows=ints([]), counts=torch.tensor([len(positions), len(sequences), 0], dtype=torch.int32),
        host_starts=starts, host_lengths=lengths,
    )  # fmt: skip


def filled(num_blocks: int, spread: int) -> KvCache:
    """Magnitudes of tokens and heads differ by 2^spread in either direction."""
    cache = attention_cache(num_blocks, KV_HEADS, DIM, FP8, "cuda")
    slots = torch.arange(num_blocks * BLOCK_TOKENS, device="cuda")
    for some in slots.split(8192):
        powers = torch.randint(-spread, spread + 1, (2, len(some), KV_HEADS, 1), device="cuda").float()
        # Keys stay small, or softmax would be of one token alone.
        keys, values = torch.randn(2, len(some), KV_HEADS, DIM, device="cuda") * torch.exp2(
            torch.stack((-powers[0].abs(), powers[1]))
        )
        cache.store(keys.to(torch.bfloat16), values.to(torch.bfloat16), some)
    return cache


def rows_of(rows: int, heads: int) -> tuple[Tensor, Tensor]:
    """qkv and a rotary table."""
    angles = torch.rand(40000, 32, device="cuda") * 6.28
    qkv = torch.randn(rows, (heads + 2) * KV_HEADS * DIM, device="cuda").to(torch.bfloat16)
    return qkv, torch.stack((angles.cos(), angles.sin()), dim=1)


def parts(qkv: Tensor) -> tuple[Tensor, ...]:
    heads = qkv.shape[1] // DIM - 2 * KV_HEADS
    return qkv.view(qkv.shape[0], -1, DIM).split((heads, KV_HEADS, KV_HEADS), dim=1)


def copy_of(cache: KvCache) -> KvCache:
    assert cache.values is not None and cache.scales is not None
    return KvCache(cache.keys.clone(), cache.values.clone(), 0, cache.scales.clone())


def same_bits(one: KvCache, other: KvCache) -> None:
    for a, b in zip(one.parts, other.parts, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), (
            f"{(a.view(torch.uint8) != b.view(torch.uint8)).sum()} differ"
        )


def close(actual: Tensor, expected: Tensor, bound: float) -> None:
    """Of each row and head."""
    actual, expected = actual.double().view(-1, DIM), expected.double().view(-1, DIM)
    error = ((actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-12)).max()
    assert error < bound, f"relative error {error:.2e}"  # NaN fails too


def test_fp8_rows_are_stored_as_the_reference_stores_them() -> None:
    rows = 60
    for interleaved in (False, True):
        qkv, table = rows_of(rows, 12)
        _, k, v = parts(qkv)
        k *= torch.exp2(torch.randint(-12, 12, (rows, KV_HEADS, 1), device="cuda").float()).to(k.dtype)
        v *= torch.exp2(torch.randint(-50, 50, (rows, KV_HEADS, 1), device="cuda").float()).to(v.dtype)
        v[3, 2], v[5] = 0, 1.75 * 2.0**8  # nothing, and a mantissa where the power changes
        positions = torch.arange(rows, device="cuda", dtype=torch.int32)
        slots = torch.randperm(80, device="cuda")[:rows].to(torch.int32)
        cache, wanted = (attention_cache(5, KV_HEADS, DIM, FP8, "cuda") for _ in range(2))
        assert cache.values is not None
        turned = attention.rotate_store(
            qkv, table, positions, slots, cache.keys, cache.values, KV_HEADS, interleaved=interleaved, scales=cache.scales
        )
        wanted.store(*parts(turned)[1:], slots)
        same_bits(cache, wanted)


def test_fp8_decode_attention() -> None:
    for lengths, splits, heads, interleaved, shape, spread in (
        ([1], 1, 12, False, (4, 2), 0),
        ([200], 1, 12, False, (4, 2), 3),
        ([200], 4, 12, True, (8, 2), 3),
        ([17, 640, 1, 1500], 8, 12, False, (4, 2), 12),
        ([1500, 31], 1, 16, False, (8, 2), 20),
        ([33000], 48, 12, False, (8, 2), 3),
        ([100, 16], 2, 4, False, (4, 2), 0),
        ([190, 513, 64], 1, 12, False, (4, 1), 3),
        ([1150, 7], 1, 12, True, (8, 1), 3),
    ):
        step = step_of([(length, 1) for length in lengths])
        cache = filled(int(step.blocks.max()) + 1, spread)
        wanted = copy_of(cache)
        qkv, table = rows_of(len(lengths), heads)
        q, k, v = parts(qkv)
        q, k = (rotate_reference(x, table, step.positions, interleaved).to(qkv.dtype) for x in (q, k))
        wanted.store(k, v, step.slots)
        expected = reference(AttentionArgs(q.float(), k, v, step, wanted, scale=SCALE))
        space = attention.workspace(len(lengths), heads * KV_HEADS, KV_HEADS, splits)
        results = []
        for _ in range(3):
            out = torch.full((len(lengths), heads * KV_HEADS * DIM), float("nan"), dtype=torch.bfloat16, device="cuda")
            assert cache.values is not None
            attention.decode_attention(
                qkv, table, step.positions, step.slots, step.lengths, step.blocks, cache.keys, cache.values, out, space,
                scale=SCALE, splits=splits, interleaved=interleaved, shape=shape, scales=cache.scales,
            )  # fmt: skip
            results.append(out)
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
        close(results[0], expected, 6e-3)
        assert not space.arrived.any()
        # Fused and separate products round the last bit of some keys differently, and with it some codes.
        assert wanted.values is not None and cache.values is not None
        assert torch.equal(cache.values.view(torch.uint8), wanted.values.view(torch.uint8))
        differ = (cache.keys.view(torch.uint8) != wanted.keys.view(torch.uint8)).sum().item()
        assert differ <= 0.02 * len(lengths) * KV_HEADS * DIM, f"{differ} codes of keys differ"


def test_fp8_rows_that_were_stored_before_are_stored_again() -> None:
    """Of chained rows: what `rotate_store` has stored, attention stores again by an angle of nothing."""
    step = step_of([(50, 1), (700, 1)])
    cache = filled(int(step.blocks.max()) + 1, 3)
    qkv, table = rows_of(2, 12)
    assert cache.values is not None
    attention.rotate_store(qkv, table, step.positions, step.slots, cache.keys, cache.values, KV_HEADS, scales=cache.scales)
    wanted = copy_of(cache)
    q, k, v = parts(qkv)
    expected = reference(AttentionArgs(q.float(), k, v, step, wanted, scale=SCALE))
    still = torch.stack((torch.ones(1, 32), torch.zeros(1, 32)), dim=1).cuda()
    out = torch.full((2, 12 * KV_HEADS * DIM), float("nan"), dtype=torch.bfloat16, device="cuda")
    attention.decode_attention(
        qkv, still, torch.zeros_like(step.positions), step.slots, step.lengths, step.blocks, cache.keys, cache.values, out,
        attention.workspace(2, 12 * KV_HEADS, KV_HEADS, 4), scale=SCALE, splits=4, shape=(8, 2), scales=cache.scales,
    )  # fmt: skip
    same_bits(cache, wanted)
    close(out, expected, 6e-3)


def test_fp8_prompts_over_a_cached_prefix() -> None:
    """The general kernels, which prompts that have begun take."""
    from windlass.runtime.kernels.triton import ops

    step = step_of([(700, 300), (40, 40), (2000, 1)])
    cache = filled(int(step.blocks.max()) + 1, 6)
    q = torch.randn(len(step.positions), 96, DIM, device="cuda").to(torch.bfloat16)
    found = ops.attention(AttentionArgs(q, q, q, step, cache, scale=SCALE))
    assert found is not None
    close(found, reference(AttentionArgs(q.float(), q, q, step, cache, scale=SCALE)), 1.2e-2)


def test_fp8_general_kernel_stores_as_the_reference_does() -> None:
    from windlass.runtime.kernels.ops import qkv as operation
    from windlass.runtime.kernels.triton import ops

    rows = 40
    qkv, table = rows_of(rows, 4)
    positions = torch.arange(rows, device="cuda", dtype=torch.int32)
    mine, wanted = (attention_cache(3, KV_HEADS, DIM, FP8, "cuda") for _ in range(2))
    how = {"norms": None, "eps": 1e-5, "table": table, "interleaved": False, "positions": positions, "slots": positions}
    ops.split_qkv(QkvArgs(qkv, 4 * KV_HEADS, KV_HEADS, DIM, cache=mine, **how))  # type: ignore[arg-type]
    operation.reference(QkvArgs(qkv.clone(), 4 * KV_HEADS, KV_HEADS, DIM, cache=wanted, **how))  # type: ignore[arg-type]
    assert mine.values is not None and wanted.values is not None
    assert torch.equal(mine.values.view(torch.uint8), wanted.values.view(torch.uint8))
    assert (mine.keys.view(torch.uint8) != wanted.keys.view(torch.uint8)).double().mean() < 0.02
