"""Attention over the paged cache in C++ equals plain PyTorch, and what a query gets depends on nothing but its own sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from windlass.runtime.kernels.arguments import AttentionArgs
from windlass.runtime.kernels.cpu import attention as native_attention
from windlass.runtime.kernels.ops.attention import reference
from windlass.runtime.kernels.program import program
from windlass.runtime.kernels.step import BLOCK_TOKENS, KvCache, Step, attention_cache, latent_cache

pytestmark = pytest.mark.cpu
SETTINGS = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

Run = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    sequences: tuple[tuple[int, int], ...] = ((17, 1),)
    """(tokens in all, of them new)"""
    dtype: torch.dtype = torch.float32
    window: int | None = None
    sinks: bool = False
    slopes: bool = False
    latent: int = 0
    """Values of a latent cache; 0 has an ordinary one."""
    seed: int = 0


def numbers(count: int) -> Tensor:
    return torch.tensor([count], dtype=torch.int32)


def made(case: Case) -> tuple[Tensor, Step, KvCache, dict[str, Tensor | int | float | None]]:
    """Blocks lie in no order, and what no sequence owns is not a number: whoever reads it is found out."""
    draw = torch.Generator().manual_seed(case.seed)
    rows = sum(new for _, new in case.sequences)
    q = torch.randn(rows, case.heads, case.dim, generator=draw)
    per_sequence = max(-(-length // BLOCK_TOKENS) for length, _ in case.sequences)
    num_blocks = per_sequence * len(case.sequences) + 1
    blocks = torch.randperm(num_blocks, generator=draw)[: num_blocks - 1].view(len(case.sequences), -1).int()
    if case.latent:
        cache = latent_cache(num_blocks, case.latent, case.dim - case.latent, case.dtype)
    else:
        cache = attention_cache(num_blocks, case.kv_heads, case.dim, case.dtype)
    for part in (cache.keys, cache.values):
        if part is not None:
            part.fill_(float("nan"))
    positions, starts = [], [0]
    for sequence, (length, new) in enumerate(case.sequences):
        tokens = torch.arange(length)
        slots = blocks[sequence, tokens // BLOCK_TOKENS] * BLOCK_TOKENS + tokens % BLOCK_TOKENS
        keys = torch.randn(length, case.kv_heads, case.dim, generator=draw)
        values = None if case.latent else torch.randn(length, case.kv_heads, case.dim, generator=draw)
        cache.store(keys, values, slots)
        positions += range(length - new, length)
        starts.append(starts[-1] + new)
    whole = torch.int32
    step = Step(
        tokens=torch.zeros(rows, dtype=whole),
        positions=torch.tensor(positions, dtype=whole),
        slots=torch.zeros(rows, dtype=whole),
        starts=torch.tensor(starts, dtype=whole),
        lengths=torch.tensor([length for length, _ in case.sequences], dtype=whole),
        blocks=blocks,
        logit_rows=torch.zeros(0, dtype=whole),
        counts=torch.tensor([rows, len(case.sequences), 0], dtype=whole),
    )
    how: dict[str, Tensor | int | float | None] = {
        "scale": case.dim**-0.5,
        "window": case.window,
        "sinks": torch.randn(case.heads, generator=draw) * 3 if case.sinks else None,
        "slopes": torch.rand(case.heads, generator=draw) if case.slopes else None,
    }
    return q, step, cache, how


def check(case: Case, run: Run) -> None:
    q, step, cache, how = made(case)
    (mine,) = run(lambda: native_attention.attention(AttentionArgs(q, q, q, step, cache, **how)), q.shape[0])
    wanted = reference(AttentionArgs(q, q, q, step, cache, **how))
    torch.testing.assert_close(mine, wanted, atol=5e-6, rtol=1e-5)


LENGTHS = st.one_of(st.sampled_from((1, 2, 15, 16, 17, 33, 63, 64, 65, 255, 256, 257)), st.integers(1, 300))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_heads = draw(st.sampled_from((1, 2, 3)))
    dim = draw(st.sampled_from((1, 4, 8, 16, 24, 64, 80, 96, 128)))
    sequences: list[tuple[int, int]] = []
    for _ in range(draw(st.integers(1, 3))):
        length = draw(LENGTHS)
        sequences.append((length, draw(st.sampled_from((1, min(length, 2), min(length, 40), length)))))
    return Case(
        heads=kv_heads * draw(st.sampled_from((1, 2, 3, 4, 5, 7, 8, 12, 13, 29))),
        kv_heads=kv_heads,
        dim=dim,
        sequences=tuple(sequences),
        dtype=draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float8_e4m3fn))),
        window=draw(st.sampled_from((None, 1, 5, 16, 100, 400))),
        sinks=draw(st.booleans()),
        slopes=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@SETTINGS
@given(case=cases())
@example(case=Case(heads=9, kv_heads=3, dim=64, sequences=((1000, 1),), dtype=torch.bfloat16))
@example(case=Case(heads=9, kv_heads=3, dim=64, sequences=((300, 1), (70, 40)), dtype=torch.float8_e4m3fn))
@example(case=Case(heads=71, kv_heads=1, dim=64, sequences=((40, 5), (300, 1))))
@example(case=Case(heads=2, kv_heads=2, dim=16, sequences=((1, 1), (16, 16), (17, 1), (33, 33))))
@example(case=Case(heads=4, kv_heads=2, dim=64, sequences=((600, 600),), window=7, sinks=True))
def test_it_equals_the_reference(case: Case, run: Run) -> None:
    check(case, run)


@SETTINGS
@given(
    heads=st.sampled_from((1, 2, 5, 20)),
    latent=st.sampled_from((4, 16, 48, 64)),
    rope=st.sampled_from((2, 8, 16)),
    length=LENGTHS,
    new=st.integers(1, 40),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
)
def test_latent_caches(heads: int, latent: int, rope: int, length: int, new: int, dtype: torch.dtype, run: Run) -> None:
    sequences = ((length, min(length, new)), (3, 1))
    check(Case(heads=heads, kv_heads=1, dim=latent + rope, latent=latent, sequences=sequences, dtype=dtype), run)


@pytest.mark.parametrize("length", (1, 15, 16, 17, 33, 64, 65, 257, 1025))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_a_row_alone_gets_what_it_gets_in_a_prompt(length: int, dtype: torch.dtype, run: Run) -> None:
    """Bit for bit, so that how a prompt is cut into chunks changes nothing."""
    case = Case(heads=6, kv_heads=2, dim=64, sequences=((length, length),), dtype=dtype, sinks=True)
    q, step, cache, how = made(case)
    (whole,) = run(lambda: native_attention.attention(AttentionArgs(q, q, q, step, cache, **how)), length)
    for row in {0, length // 2, length - 1}:
        alone = replace(
            step,
            starts=torch.tensor([0, 1], dtype=torch.int32),
            lengths=numbers(row + 1),
            counts=torch.tensor([1, 1, 0], dtype=torch.int32),
        )
        one = q[row : row + 1]
        result = native_attention.attention(AttentionArgs(one, one, one, alone, cache, **how))
        assert result is not None and torch.equal(result[0], whole[row])


def test_neighbours_change_nothing(run: Run) -> None:
    sequences = ((700, 1), (20, 20), (1, 1), (300, 50))
    q, step, cache, how = made(Case(heads=6, kv_heads=2, dim=64, sequences=sequences, window=200))
    (together,) = run(lambda: native_attention.attention(AttentionArgs(q, q, q, step, cache, **how)), q.shape[0])
    for index, (length, new) in enumerate(sequences):
        first = int(step.starts[index])
        own = q[first : first + new]
        alone = replace(
            step,
            starts=torch.tensor([0, new], dtype=torch.int32),
            lengths=numbers(length),
            blocks=step.blocks[index : index + 1],
            counts=torch.tensor([new, 1, 0], dtype=torch.int32),
        )
        result = native_attention.attention(AttentionArgs(own, own, own, alone, cache, **how))
        assert result is not None and torch.equal(result, together[first : first + new])


@pytest.mark.parametrize("length", (100, 3000))
def test_the_number_of_threads_changes_nothing(length: int, instruction_set: str) -> None:
    q, step, cache, how = made(Case(heads=3, kv_heads=1, dim=64, sequences=((length, 1), (5, 5))))
    results = []
    for count in (1, 2, 3):
        program.set_threads(count)
        results.append(native_attention.attention(AttentionArgs(q, q, q, step, cache, **how)))
    program.set_threads(program.num_threads())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_buffers_may_be_longer_than_what_is_in_them(run: Run) -> None:
    """As a runner's are: padding is neither read nor written, and sequences are counted at every run."""
    q, step, cache, how = made(Case(sequences=((40, 3), (20, 1))))
    wanted = reference(AttentionArgs(q, q, q, step, cache, **how))
    padded = replace(
        step,
        starts=torch.cat((step.starts, torch.full((5,), 999, dtype=torch.int32))),
        lengths=torch.cat((step.lengths, torch.full((5,), 999, dtype=torch.int32))),
        blocks=torch.cat((step.blocks, torch.full((5, step.blocks.shape[1]), 10**6, dtype=torch.int32))),
    )
    wide = torch.cat((q, q.new_full((7, *q.shape[1:]), float("nan"))))
    (result,) = run(lambda: native_attention.attention(AttentionArgs(wide, q, q, padded, cache, **how)), 4)
    torch.testing.assert_close(result[:4], wanted, atol=5e-6, rtol=1e-5)


def test_queries_may_be_part_of_something_wider(run: Run) -> None:
    q, step, cache, how = made(Case(sequences=((40, 3),)))
    wide = torch.cat((q, q * 9), dim=1)
    (mine,) = run(lambda: native_attention.attention(AttentionArgs(wide[:, :4], q, q, step, cache, **how)), 3)
    torch.testing.assert_close(mine, reference(AttentionArgs(q, q, q, step, cache, **how)), atol=5e-6, rtol=1e-5)


def test_large_scores_do_not_overflow(run: Run) -> None:
    q, step, cache, how = made(Case(sequences=((300, 300),)))
    q = q * 200
    (mine,) = run(lambda: native_attention.attention(AttentionArgs(q, q, q, step, cache, **how)), 300)
    torch.testing.assert_close(mine, reference(AttentionArgs(q, q, q, step, cache, **how)), atol=1e-4, rtol=1e-4)


def test_without_a_cache_it_is_the_references_turn() -> None:
    q, step, _, how = made(Case())
    assert native_attention.attention(AttentionArgs(q, q, q, step, None, **how)) is None
