"""Heads that do not come in whole groups: every query asks the keys it would ask of one rank, plain and compiled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.runtime.kernels.arguments import AttentionArgs
from windlass.runtime.kernels.head_groups import Span, spans_of
from windlass.runtime.kernels.ops.attention import attention
from windlass.runtime.kernels.step import KvCache, Step, attention_cache

pytestmark = pytest.mark.cpu


@given(st.integers(1, 6), st.integers(1, 5), st.data())
def test_every_head_once_and_with_its_own(group: int, num_kv_heads: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, group * num_kv_heads - 1))
    last = data.draw(st.integers(first + 1, group * num_kv_heads))
    kv_first, kv_last = first // group, -(-last // group)
    found = spans_of(last - first, kv_last - kv_first, group, first - kv_first * group)
    assert len(found) <= 3
    asked = {}
    for span in found or (Span(0, last - first, 0, kv_last - kv_first),):
        each, left = divmod(span.num_heads, span.num_kv_heads)
        assert not left
        asked |= {head: span.kv_first + (head - span.first) // each for head in range(*span.heads)}
    assert asked == {head - first: head // group - kv_first for head in range(first, last)}


def test_what_nobody_asks_for_is_left_out() -> None:
    """A rank may hold more kv heads than it needs, where a scheme cuts no finer."""
    assert spans_of(2, 2, 2, 2) == (Span(0, 2, 1, 2),)
    assert spans_of(2, 2, 2, 0) == (Span(0, 2, 0, 1),)
    assert spans_of(4, 2, 2, 0) == ()


def step_of(lengths: list[int]) -> Step:
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    positions = torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths])
    blocks = torch.arange(2 * len(lengths), dtype=torch.int32).view(-1, 2)
    counts = torch.tensor([sum(lengths), len(lengths), 0], dtype=torch.int32)
    slots = torch.cat([torch.arange(length, dtype=torch.int32) + 32 * number for number, length in enumerate(lengths)])
    return Step(positions, positions, slots, starts, torch.tensor(lengths, dtype=torch.int32), blocks, positions[:0], counts)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("cached", [True, False])
@settings(max_examples=15)
@given(st.integers(0, 4), st.integers(1, 5), st.booleans(), st.booleans(), st.integers(0, 99))
def test_some_heads_of_all(compiled: bool, cached: bool, first: int, count: int, sinks: bool, slopes: bool, seed: int) -> None:
    """Six heads on two: any of them, one after another, get what they get together with the others."""
    chance = torch.Generator().manual_seed(seed)
    step, last = step_of([19, 3]), min(first + count, 6)
    kv = slice(first // 3, -(-last // 3))
    q, k, v = (torch.randn(22, heads, 8, generator=chance) for heads in (6, 2, 2))
    if not compiled:
        q, k, v = q.double(), k.double(), v.double()
    biases = {
        "sinks": torch.randn(6, generator=chance) if sinks else None,
        "slopes": torch.rand(6, generator=chance) if slopes else None,
    }
    whole = attention(AttentionArgs(q, k, v, step, stored(k, v, step) if cached else None, scale=0.3, **biases))
    own = {name: None if bias is None else bias[first:last].contiguous() for name, bias in biases.items()}
    spans = spans_of(last - first, kv.stop - kv.start, 3, first - kv.start * 3)
    cache = stored(k[:, kv], v[:, kv], step) if cached else None
    found = attention(AttentionArgs(q[:, first:last], k[:, kv], v[:, kv], step, cache, scale=0.3, **own, spans=spans))
    torch.testing.assert_close(found, whole.view(22, 6, 8)[:, first:last].flatten(1), atol=1e-5, rtol=1e-5)


def stored(k: torch.Tensor, v: torch.Tensor, step: Step) -> KvCache:
    cache = attention_cache(4, k.shape[1], 8, k.dtype)
    cache.store(k, v, step.slots)
    return cache
