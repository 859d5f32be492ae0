"""Attention in plain PyTorch equals its definition, summed pair by pair."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from windlass.runtime.kernels.arguments import AttentionArgs
from windlass.runtime.kernels.ops.attention import reference
from windlass.runtime.kernels.step import BLOCK_TOKENS, Step, attention_cache, latent_cache

pytestmark = pytest.mark.cpu


@dataclass(frozen=True)
class Case:
    sequences: tuple[tuple[int, int], ...]
    """(tokens before this step, tokens in it)"""
    kv_heads: int
    group: int
    window: int | None
    sinks: bool
    slopes: bool
    seed: int


cases = st.builds(
    Case,
    sequences=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 5)), min_size=1, max_size=3).map(tuple),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    window=st.sampled_from([None, 1, 3, 18]),
    sinks=st.booleans(),
    slopes=st.booleans(),
    seed=st.integers(0, 999),
)


def make_step(sequences: tuple[tuple[int, int], ...], blocks: Tensor) -> Step:
    positions = torch.tensor([before + row for before, rows in sequences for row in range(rows)])
    numbers = torch.cat([torch.full((rows,), number) for number, (_, rows) in enumerate(sequences)])
    return Step(
        tokens=positions.int(),
        positions=positions.int(),
        slots=(blocks[numbers, positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS).int(),
        starts=torch.tensor(list(accumulate((rows for _, rows in sequences), initial=0)), dtype=torch.int32),
        lengths=torch.tensor([before + rows for before, rows in sequences], dtype=torch.int32),
        blocks=blocks.int(),
        logit_rows=torch.zeros(0, dtype=torch.int32),
        counts=torch.tensor([len(positions), len(sequences), 0], dtype=torch.int32),
    )


def defined(q: Tensor, keys: Tensor, values: Tensor, position: int, case: Case, sinks: Tensor, slopes: Tensor) -> list[float]:
    """One query, all heads: q [heads, dim], keys and values [tokens, kv heads, dim]."""
    result: list[float] = []
    for head in range(q.shape[0]):
        scores = {}
        for token in range(position + 1):
            if case.window is None or position - token < case.window:
                score = 0.3 * float(q[head] @ keys[token, head // case.group])
                scores[token] = math.exp(score - (float(slopes[head]) * (position - token) if case.slopes else 0.0))
        total = sum(scores.values()) + (math.exp(float(sinks[head])) if case.sinks else 0.0)
        mixed = sum((weight / total * values[token, head // case.group] for token, weight in scores.items()), torch.zeros(()))
        result += mixed.tolist()
    return result


@given(case=cases)
def test_definition(case: Case) -> None:
    draw = torch.Generator().manual_seed(case.seed)
    heads, dim = case.kv_heads * case.group, 4
    sinks, slopes = torch.randn(heads, generator=draw), torch.rand(heads, generator=draw)
    needed = [-(-(before + rows) // BLOCK_TOKENS) for before, rows in case.sequences]
    blocks = torch.randperm(max(needed) * len(needed), generator=draw).view(len(needed), -1)
    step = make_step(case.sequences, blocks)
    cache = attention_cache(blocks.numel(), case.kv_heads, dim, torch.float32)
    q = torch.randn(len(step.positions), heads, dim, generator=draw)
    expected: list[list[float]] = []
    for number, (before, rows) in enumerate(case.sequences):
        keys, values = torch.randn(2, before + rows, case.kv_heads, dim, generator=draw)
        places = torch.arange(before + rows)
        cache.store(keys, values, blocks[number, places // BLOCK_TOKENS] * BLOCK_TOKENS + places % BLOCK_TOKENS)
        first = int(step.starts[number])
        expected += [defined(q[first + row], keys, values, before + row, case, sinks, slopes) for row in range(rows)]
    nothing = q[:, : case.kv_heads] * float("nan")
    how = {"window": case.window, "sinks": sinks if case.sinks else None, "slopes": slopes if case.slopes else None}
    found = reference(AttentionArgs(q, nothing, nothing, step, cache, scale=0.3, **how))
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_without_a_cache_each_sequence_sees_itself() -> None:
    step = make_step(((0, 5), (0, 3)), torch.zeros(2, 1, dtype=torch.long))
    q, k, v = torch.randn(8, 4, 6), torch.randn(8, 2, 6), torch.randn(8, 2, 6)
    found = reference(AttentionArgs(q, k, v, step, None, scale=6**-0.5))
    for rows in (slice(0, 5), slice(5, 8)):
        parts = (part[rows].transpose(0, 1) for part in (q, k, v))
        expected = functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(found[rows], expected.transpose(0, 1).flatten(1))


def test_values_are_part_of_a_latent_key() -> None:
    step = make_step(((0, 20),), torch.tensor([[2, 0]]))
    cache = latent_cache(3, 5, 2, torch.float32)
    q, keys = torch.randn(20, 3, 7), torch.randn(20, 1, 7)
    cache.store(keys, None, step.slots)
    found = reference(AttentionArgs(q, keys, keys, step, cache, scale=0.5))
    assert found.shape == (20, 15)
    torch.testing.assert_close(found, reference(AttentionArgs(q, keys, keys[..., :5], step, None, scale=0.5)))


def test_a_window_of_one_sees_itself() -> None:
    step = make_step(((0, 4),), torch.zeros(1, 1, dtype=torch.long))
    q, k, v = torch.randn(3, 4, 2, 6)
    torch.testing.assert_close(reference(AttentionArgs(q, k, v, step, None, scale=1.0, window=1)), v.flatten(1))
