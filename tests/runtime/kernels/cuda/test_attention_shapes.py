"""How decode attention is launched: its blocks fit side by side, and are there at once where they can be. No GPU is needed."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from windlass.runtime.kernels.cuda import attention, driver  # noqa: E402

pytestmark = pytest.mark.cpu

PROCESSORS = 132
SHARED_BYTES, RESERVED_BYTES, STATIC_BYTES = 228 * 1024, 1024, 1152
"""Of a multiprocessor of Hopper; of each block; beside what a launch asks for (without rows of one sequence)."""


@pytest.fixture(autouse=True)
def processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "num_processors", lambda: PROCESSORS)


@pytest.mark.parametrize("shape", attention.TOGETHER)
@pytest.mark.parametrize("fp8", [False, True])
def test_blocks_fit_side_by_side(shape: tuple[int, int], fp8: bool) -> None:
    warps, depth = shape
    shared = attention.shared_bytes(warps, depth * 2, attention.FP8_PAGE_BYTES) if fp8 else attention.shared_bytes(warps, depth)
    assert (shared + RESERVED_BYTES + STATIC_BYTES) * attention.TOGETHER[shape] <= SHARED_BYTES


@pytest.mark.parametrize(
    ("tokens", "sequences", "splits", "shape"),
    [
        (512, 1, 1, (8, 2)),
        (512, 16, 1, (8, 2)),
        (2048, 1, 8, (8, 2)),
        (2048, 8, 2, (8, 2)),
        (131072, 1, 16, (8, 2)),
        (2048, 16, 1, (8, 2)),
        (2048, 32, 1, (8, 1)),
        (512, 32, 1, (4, 2)),
        (2048, 48, 1, (4, 2)),
        (512, 64, 1, (4, 1)),
        (2048, 64, 1, (4, 1)),
        (512, 256, 1, (4, 1)),
        (2048, 256, 1, (4, 2)),
    ],
)
def test_the_fastest_of_those_measured(tokens: int, sequences: int, splits: int, shape: tuple[int, int]) -> None:
    assert attention.launch_shape(tokens, sequences, 8) == (splits, shape)


def test_all_blocks_are_there_at_once_where_they_can_be() -> None:
    for sequences in range(1, 67):
        for tokens in (512, 2048):
            splits, shape = attention.launch_shape(tokens, sequences, 8)
            assert splits * sequences * 8 <= attention.TOGETHER[shape] * PROCESSORS
