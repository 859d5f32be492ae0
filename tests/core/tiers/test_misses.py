"""What experts on disk cost a step beside a device, against the steps that were measured."""

from __future__ import annotations

import pytest

from windlass.core.tiers.misses import PASS_SECONDS, Misses

pytestmark = pytest.mark.pure

EXPERT, LAYERS = 8_916_992, 13
"""GLM-4.5-Air in int4 with 14 layers, of which the first has no experts."""
HOST = 85.4e9


def test_measured_steps_beside_an_h200() -> None:
    """With the misses and the speeds of these runs (docs/reference/offload.md): 27.2 experts a step with one row, read at 1.9 GB/s, 150 ms; with
    eight rows half of 35.5 of each layer's 88, read at 2.84 GB/s, 746 ms."""
    one = Misses(27.2 * EXPERT, EXPERT, LAYERS).waiting_seconds(0.4e-3, HOST, 1.9e9)
    assert one == pytest.approx(0.150, rel=0.15)
    eight = Misses(0.5 * 35.5 * LAYERS * EXPERT, EXPERT, LAYERS).waiting_seconds(0.4e-3, HOST, 2.84e9)
    assert eight == pytest.approx(0.746, rel=0.15)


def test_a_layer_that_misses_nothing_does_not_wait() -> None:
    assert Misses(0.0, EXPERT, LAYERS).waiting_seconds(2e-3, HOST, 2e9) == pytest.approx(LAYERS * 2e-3)
    few = Misses(0.1 * EXPERT, EXPERT, LAYERS)
    assert few.layers == pytest.approx(0.1, rel=0.01), "hardly ever two in one layer"
    waits = EXPERT / 2e9 + PASS_SECONDS + EXPERT / HOST
    assert few.waiting_seconds(2e-3, HOST, 2e9) == pytest.approx(LAYERS * 2e-3 + 0.1 * (waits - 2e-3), rel=0.01)


def test_computing_hides_reads_that_are_shorter() -> None:
    assert Misses(LAYERS * EXPERT, EXPERT, LAYERS).waiting_seconds(0.1, HOST, 2e9) == pytest.approx(LAYERS * 0.1)


@pytest.mark.parametrize(("experts", "burst"), [(0.0, 1), (0.5, 1), (13.0, 2), (31.3, 3), (130.0, 10)])
def test_a_layer_asks_for_all_that_it_misses_at_once(experts: float, burst: int) -> None:
    assert Misses(experts * EXPERT, EXPERT, LAYERS).burst == burst
