"""Which of several rounds counts: the best of either, as noise only takes away."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from windlass.runtime.offload.device import speeds  # noqa: E402
from windlass.runtime.offload.device.share import ShareCounts  # noqa: E402

pytestmark = pytest.mark.cpu


def test_each_speed_is_that_of_its_best_round() -> None:
    links = iter([40e9, 49e9, 48e9, 47e9, 46e9])
    # Busy for 0.1 s each round; the first ones are disturbed. What was counted before the first round does not count.
    moved = [5e9, 5e9 + 1.6e9, 5e9 + 7.8e9, 5e9 + 14.0e9, 5e9 + 19.0e9, 5e9 + 25.0e9]
    counts = iter([ShareCounts(1 + 0.1 * number, int(num_bytes)) for number, num_bytes in enumerate(moved)])
    link, cpu = speeds.best_of(lambda: next(links), lambda: next(counts))
    assert link == 49e9 and cpu == pytest.approx(62e9)


def test_a_cpu_that_was_never_asked_has_no_speed() -> None:
    assert speeds.best_of(lambda: 1.0, lambda: ShareCounts(0.0, 0)) == (1.0, 0.0)
