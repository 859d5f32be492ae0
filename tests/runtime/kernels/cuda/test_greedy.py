"""The most likely token of each row, and the step that follows: plain PyTorch against a loop, and the kernel against that."""

# ruff: noqa: E402 (the folder of cuda_references is put on the path first)

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

CUDA_TESTS = str(Path(__file__).parent)
if CUDA_TESTS not in sys.path:
    sys.path.insert(0, CUDA_TESTS)

from cuda_references import greedy_reference

from windlass.runtime.kernels.cuda.greedy import greedy, workspace
from windlass.runtime.kernels.step import BLOCK_TOKENS, Step

NUMBERS = st.sampled_from([0.0, 1.0, 2.0, -3.0, 1e30, math.inf, -math.inf, math.nan])
FIELDS = ("tokens", "positions", "slots", "lengths")


def make_step(positions: list[int], max_blocks: int, seed: int = 0) -> Step:
    """One token of each sequence, in blocks that are nobody else's."""
    rows = len(positions)
    order = torch.randperm(rows * max_blocks, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    blocks = order.view(rows, max_blocks)
    at = torch.tensor(positions, dtype=torch.int32)
    return Step(
        tokens=torch.arange(rows, dtype=torch.int32) + 900,
        positions=at,
        slots=blocks[torch.arange(rows), at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS,
        starts=torch.arange(rows + 1, dtype=torch.int32),
        lengths=at + 1,
        blocks=blocks,
        logit_rows=torch.arange(rows, dtype=torch.int32),
        counts=torch.tensor([rows, rows, rows], dtype=torch.int32),
    )


def most_likely(row: list[float]) -> int:
    """The first of the largest; -1 where that is no finite number, or some are none at all."""
    if any(math.isnan(value) for value in row) or not math.isfinite(max(row)):
        return -1
    return row.index(max(row))


def expected(logits: list[list[float]], num_tokens: int, step: Step, count: int) -> tuple[list[int], list[tuple[int, ...]]]:
    """Tokens; and token, position, slot and length of every row afterwards."""
    chosen = [most_likely(row[:num_tokens]) for row in logits]
    after: list[tuple[int, ...]] = []
    for row, token in enumerate(chosen):
        if row >= count:
            after.append(tuple(int(getattr(step, field)[row]) for field in FIELDS))
            continue
        at = int(step.positions[row]) + 1
        block = step.blocks[row].tolist()[min(at // BLOCK_TOKENS, step.blocks.shape[1] - 1)]
        after.append((max(token, 0), at, block * BLOCK_TOKENS + at % BLOCK_TOKENS, at + 1))
    return chosen, after


def copied(step: Step, device: str = "cpu") -> Step:
    return replace(step, blocks=step.blocks.to(device), **{field: getattr(step, field).clone().to(device) for field in FIELDS})


def after(step: Step) -> list[tuple[int, ...]]:
    return [*zip(*(getattr(step, field).tolist() for field in FIELDS), strict=True)]


@pytest.mark.cpu
@given(st.data())
def test_as_a_plain_loop_says(data: st.DataObject) -> None:
    """Ties, numbers that are none, rows that only fill up, columns that are no tokens, and steps over the end of a block."""
    rows, num_tokens = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    columns = num_tokens + data.draw(st.integers(0, 2))
    logits = data.draw(st.lists(st.lists(NUMBERS, min_size=columns, max_size=columns), min_size=rows, max_size=rows))
    max_blocks = data.draw(st.integers(1, 3))
    positions = data.draw(st.lists(st.integers(0, max_blocks * BLOCK_TOKENS - 1), min_size=rows, max_size=rows))
    count = data.draw(st.integers(0, rows))
    step = make_step(positions, max_blocks, seed=rows)
    chosen, moved = expected(logits, num_tokens, step, count)
    found = greedy_reference(torch.tensor(logits), num_tokens, step, torch.tensor([count, count, count]))
    assert found.dtype is torch.int32
    assert found.tolist() == chosen
    assert after(step) == moved


@pytest.mark.cpu
def test_of_equals_the_lowest() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0], [-2.0, -2.0, -2.0], [0.0, 0.0, 7.0]])
    assert greedy_reference(logits, 2, make_step([0, 3, 9], 1), torch.tensor([3])).tolist() == [1, 0, 0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernel_equals_the_reference() -> None:
    for rows, num_tokens, columns, seed in ((1, 151552, 151552, 0), (7, 1000, 1024, 1), (64, 33, 40, 2), (256, 5000, 5000, 3)):
        logits = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
        logits[0, [num_tokens // 2, num_tokens - 1]] = 50.0  # equals
        for row, value in ((1, math.nan), (3, math.inf), (5, -math.inf)):
            if row < rows:
                logits[row, :: 1 if value < 0 else 7] = value
        logits[:, num_tokens:] = 99.0
        space = workspace(rows, torch.device("cuda"))
        plain = make_step([(row * 5) % (4 * BLOCK_TOKENS) for row in range(rows)], 4)
        there = copied(plain, "cuda")
        for count in (rows, max(rows - 3, 0)):  # twice: what the first leaves behind does not change the second
            counts = torch.tensor([count, count, count], dtype=torch.int32)
            found: Tensor = greedy(logits.cuda(), num_tokens, there, counts.cuda(), space)
            assert found.tolist() == greedy_reference(logits, num_tokens, plain, counts).tolist()
            assert after(there) == after(plain)
            assert not space.arrived.any()
