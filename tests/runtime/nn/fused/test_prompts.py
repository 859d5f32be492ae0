"""Rows of a fused step that are prompts: what has begun and what is new, and the step by which kernels are compiled before the first one."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from windlass.runtime.kernels.step import BLOCK_TOKENS
from windlass.runtime.nn.fused.prompts import FRESH_SEQUENCES, PROMPT_ROWS, continued, padded_rows, prompts_of

pytestmark = pytest.mark.cpu
BLOCKS = list(range(8))


def test_begun_prompts_come_first(tiny: Any) -> None:
    tokens = list(range(40))
    chunks = [(tokens, 4, 5), (tokens, 8, 12), (tokens, 0, 7), (tokens, 0, 3)]
    step = tiny.step([tiny.chunk(*chunk, BLOCKS) for chunk in chunks])
    prompts = prompts_of(step, 1)
    assert prompts.begun is not None and prompts.begun.sizes() == ([0, 4], [12])
    assert prompts.new == [(4, 11), (11, 14)] and prompts.positions.tolist()[:4] == [8, 9, 10, 11]
    assert prompts.padding == 11 + PROMPT_ROWS - 14


def test_of_many_new_prompts_the_first_count_as_begun(tiny: Any) -> None:
    step = tiny.step([tiny.chunk([1, 2], 0, 2, BLOCKS) for _ in range(FRESH_SEQUENCES + 3)])
    prompts = prompts_of(step, 0)
    assert prompts.begun is not None and len(prompts.begun.lengths) == 3 and len(prompts.new) == FRESH_SEQUENCES


@pytest.mark.parametrize(("rows", "expected"), [(1, PROMPT_ROWS), (PROMPT_ROWS, PROMPT_ROWS), (PROMPT_ROWS + 1, 2 * PROMPT_ROWS)])
def test_padded_rows(rows: int, expected: int) -> None:
    assert padded_rows(rows) == expected


def test_a_step_that_goes_on_reads_the_first_block_alone(tiny: Any) -> None:
    """Whatever the table of the other step holds: it may never have been filled."""
    step = tiny.step([tiny.chunk(list(range(40)), 39, 40, [7, 7, 7])])
    step.blocks.fill_(10**6)
    made = continued(step, 5, 2 * BLOCK_TOKENS)
    assert made.sizes() == ([0, 5], [2 * BLOCK_TOKENS]) and made.counts.tolist() == [5, 1, 0]
    assert made.positions.tolist() == list(range(2 * BLOCK_TOKENS - 5, 2 * BLOCK_TOKENS))
    assert not made.blocks.any() and made.blocks.stride(0) == step.blocks.stride(0)
