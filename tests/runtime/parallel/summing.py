"""What links alone do, checked by every rank of a group of processes: sums to the bit, small numbers, rows and logits."""

from __future__ import annotations

import math
import os
from itertools import pairwise
from typing import Any

import torch
from talking import Way, joined
from torch import Tensor

from windlass.core.layout import Layout

SIZES = (1, 63, 64, 65, 1000, 2048, 5000, 70_000, 300_001)
BLOCK = 64
HALF_A_SCALE = 2 ** (1 / 6) / 254
"""Of the largest magnitude in a block: scales lie six to an octave."""


def rank_of_links(rank: int, folder: str, layout: Layout, way: Way) -> None:
    """Odd ranks compute as an older machine would: bits must not depend on it."""
    if rank % 2:
        os.environ["WINDLASS_ISA"] = "plain"
    groups = joined(rank, folder, layout, way)
    if layout.pp > 1:
        check_passed_logits(groups.pp)
        return
    if way.sync == "int8":
        check_small(groups.tp)
        check_not_numbers(groups.tp)
    else:
        check_exact(groups.tp)
    check_rows(groups.tp, 0.0 if way.sync == "exact" else HALF_A_SCALE)
    check_logits(groups.tp)


def said_by(rank: int, count: int, seed: int = 0) -> Tensor:
    """What a rank says: every other rank knows it too. Magnitudes differ from block to block."""
    chance = torch.Generator().manual_seed(1000 * seed + rank)
    scales = torch.exp(3 * torch.randn(-(-count // BLOCK), generator=chance)).repeat_interleave(BLOCK)[:count]
    return torch.randn(count, generator=chance) * scales


# --- sums


def check_exact(group: Any) -> None:
    """In the order of ranks, and so the same bits everywhere and every time."""
    for count in SIZES:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            parts = [said_by(rank, count).to(dtype) for rank in range(group.size)]
            wide = torch.float32 if dtype == torch.bfloat16 else dtype
            expected = parts[0].to(wide)
            for part in parts[1:]:
                expected = expected + part.to(wide)
            x = parts[group.rank].clone()
            group.all_reduce(x)
            assert torch.equal(x, expected.to(dtype)), (count, dtype)


def check_small(group: Any) -> None:
    """Within the bound, not exact (it was rounded), and the same bits on all ranks."""
    for count in SIZES:
        parts = [said_by(rank, count, 7) for rank in range(group.size)]
        expected = torch.stack(parts).double().sum(0)
        x = parts[group.rank].clone()
        group.all_reduce(x)
        largest = sum(block_largest(part) for part in parts) + (block_largest(expected) if group.size > 2 else 0)
        allowed = 1.02 * HALF_A_SCALE * largest + 1e-7
        error = (x.double() - expected).abs()
        assert bool((error <= allowed).all()), (count, float((error / allowed).max()))
        assert count < BLOCK or 0.001 < float(error.norm() / expected.norm()) < 0.02
        check_same(group, x)
    zeros = torch.zeros(100)
    group.all_reduce(zeros)
    assert not zeros.any()


def block_largest(x: Tensor) -> Tensor:
    """Of its block, at every place."""
    padded = torch.nn.functional.pad(x.double().abs(), (0, -len(x) % BLOCK)).view(-1, BLOCK)
    return padded.amax(1).repeat_interleave(BLOCK)[: len(x)]


def check_same(group: Any, x: Tensor) -> None:
    bits = x.view(torch.int32)
    everybody = [torch.empty_like(bits) for _ in range(group.size)]
    group.all_gather(bits, everybody)
    assert all(torch.equal(bits, other) for other in everybody)


def check_not_numbers(group: Any) -> None:
    """What cannot be said in 8 bits is said to be nothing, in its block and no other; what is tiny is nothing."""
    for bad in (math.nan, math.inf, -math.inf, 1e30):
        x = torch.ones(3 * BLOCK)
        if group.rank == group.size - 1:
            x[BLOCK + 5] = bad
        group.all_reduce(x)
        assert bool(x[BLOCK : 2 * BLOCK].isnan().all())
        assert float((torch.cat((x[:BLOCK], x[2 * BLOCK :])) - group.size).abs().max()) < 0.02 * group.size
    x = torch.full((BLOCK,), 1e-30)
    group.all_reduce(x)
    assert not x.any()
    large = torch.full((BLOCK,), 1e6)
    group.all_reduce(large)
    assert float((large / (1e6 * group.size) - 1).abs().max()) < 0.02


# --- a vocabulary that ranks share


def check_rows(group: Any, bound: float) -> None:
    """Each row comes from the rank that has its token; of all shares of tokens, none too."""
    from windlass.runtime.kernels.cpu.links import starts_of

    size, width = group.size, 200
    intervals = [(10 * rank, 10 * rank + 10) for rank in range(size)]
    starts = starts_of(intervals)
    for tokens in ([3], [10 * size - 1], [0] * 5, [(7 * at) % (10 * size) for at in range(23)]):
        given = torch.tensor(tokens, dtype=torch.int32)
        local = group.localize(given, intervals[group.rank])
        own = (given >= 10 * group.rank) & (given < 10 * group.rank + 10)
        assert torch.equal(local[own], given[own] - 10 * group.rank)
        assert bool(((local >= 0) & (local < 10)).all())
        expected = torch.stack([said_by(token, width, 3) for token in tokens])
        rows = torch.where(own[:, None], expected, torch.nan)
        group.exchange_rows(rows, given, starts)
        allowed = torch.stack([block_largest(row) for row in expected]) * bound * 1.02
        assert bool(((rows - expected).abs() <= allowed).all())
        check_same(group, rows.flatten())
        if not bound:
            wide = torch.where(own[:, None], expected, torch.nan).double()
            group.exchange_rows(wide, given, starts)
            assert torch.equal(wide, expected.double())


def check_logits(group: Any) -> None:
    """The first rank has all logits, or those that are wanted in their places and nothing else."""
    from windlass.runtime.kernels.cpu.links import starts_of

    edges = [100 * rank + 7 * rank * rank for rank in range(group.size + 1)]
    intervals = list(pairwise(edges))
    starts, (first, last) = starts_of(intervals), intervals[group.rank]
    logits = torch.stack([torch.randn(edges[-1], generator=torch.Generator().manual_seed(row)) for row in range(3)])
    logits[1, ::9] = 9.0  # equals: the first of them count
    logits[2, edges[-1] // 2] = math.nan
    for wanted, num_tokens in ((0, 0), (1, 0), (5, 0), (40, 0), (1, edges[-1] - 120), (4, edges[-1] - 9), (1000, 0)):
        whole = torch.full((3 if group.rank == 0 else 0, edges[-1]), 77.0)
        candidates = torch.tensor([wanted, num_tokens], dtype=torch.int32)
        group.gather_logits(logits[:, first:last].contiguous(), whole, starts, candidates)
        if group.rank == 0:
            check_candidates(whole, logits, wanted, num_tokens or edges[-1])
    wide = torch.zeros((3 if group.rank == 0 else 0, edges[-1]), dtype=torch.float64)
    group.gather_logits(logits[:, first:last].double(), wide, starts, None)
    assert group.rank or torch.equal(wide.nan_to_num(5), logits.double().nan_to_num(5))


def check_candidates(found: Tensor, logits: Tensor, wanted: int, num_tokens: int) -> None:
    for row, true in zip(found, logits, strict=True):
        here = row != -math.inf
        assert torch.equal(row[here].nan_to_num(5), true[here].nan_to_num(5)), "every logit that is there is right"
        if not wanted:
            assert bool(here.all())
            continue
        order = torch.argsort(true[:num_tokens].nan_to_num(math.inf), descending=True, stable=True)[:wanted]
        assert bool(here[order].all()), "and the largest are there"
        assert int(row[:num_tokens].nan_to_num(math.inf).argmax()) == int(order[0])


def check_passed_logits(group: Any) -> None:
    logits = torch.randn(2, 500, generator=torch.Generator().manual_seed(5))
    logits[0, 100:110] = 8.0
    for wanted, num_tokens in ((0, 0), (1, 0), (3, 0), (2, 90), (400, 0)):
        candidates = torch.tensor([wanted, num_tokens], dtype=torch.int32)
        if group.rank == group.size - 1:
            group.send_next_logits(logits, candidates)
        elif group.rank == 0:
            found = torch.full((2, 500), 77.0)
            group.receive_previous_logits(found, candidates)
            check_candidates(found, logits, wanted, num_tokens or 500)
    sent, received = (group.counts().get(name) for name in ("send_next", "receive_previous"))
    assert (sent is None or sent.sent_bytes == 4000 + 16 + 48 + 32 + 4000) and (sent or received or group.size > 2)
