"""Native operations are tested on every instruction set this machine has, on the best also with two threads, run at once and replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from windlass.runtime.kernels import build
from windlass.runtime.kernels.program import program

INSTRUCTION_SETS = ("plain", "avx2", "avx512")


def _sets_here() -> list[int]:
    native = build.library("native")
    return [] if native is None else list(range(_use(native.windlass_use_instruction_set(2)) + 1))


def _use(number: int) -> int:
    native = build.library("native")
    assert native is not None
    native.windlass_use_instruction_set(-1)
    return number


@contextmanager
def _with_instruction_set(number: int) -> Iterator[str]:
    native = build.library("native")
    assert native is not None
    native.windlass_use_instruction_set(number)
    try:
        yield INSTRUCTION_SETS[number]
    finally:
        native.windlass_use_instruction_set(-1)


@pytest.fixture(params=_sets_here(), ids=lambda number: INSTRUCTION_SETS[number])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    with _with_instruction_set(request.param) as name:
        yield name


def _modes() -> list[tuple[int, int]]:
    """Every instruction set with one thread, and the best with two: how threads share the work does not depend on the instruction set, and
    two that wait for each other on busy cores take most of the time."""
    sets = _sets_here()
    return [*((number, 1) for number in sets), *((number, 2) for number in sets[-1:])]


@pytest.fixture(params=_modes(), ids=lambda mode: f"{INSTRUCTION_SETS[mode[0]]}-{mode[1]}-threads")
def kernel_mode(request: pytest.FixtureRequest) -> Iterator[None]:
    number, num_threads = request.param
    with _with_instruction_set(number):
        program.set_threads(num_threads)
        yield
        program.set_threads(program.num_threads())


@pytest.fixture
def run(kernel_mode: None) -> Callable[..., tuple[Tensor, ...]]:
    """run(operation, rows): the operation's results, which are the same at once and replayed."""

    def both(operation: Callable[[], Tensor | Sequence[Tensor] | None], rows: int) -> tuple[Tensor, ...]:
        at_once = _several(operation())
        with program.record(torch.tensor([rows], dtype=torch.int32)) as recorded:
            later = _several(operation())
        recorded.run()
        for one, other in zip(at_once, later, strict=True):
            torch.testing.assert_close(
                other[:rows], one[:rows], atol=0, rtol=0, equal_nan=True, msg="a replay gives something else"
            )
        return at_once

    return both


def _several(results: Tensor | Sequence[Tensor] | None) -> tuple[Tensor, ...]:
    assert results is not None, "the native operation does not cover this case"
    return (results,) if isinstance(results, Tensor) else tuple(results)
