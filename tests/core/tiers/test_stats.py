"""Counters of several ranks, added up."""

from __future__ import annotations

import pytest

from windlass.core.tiers.stats import TierStats, total_tiers

pytestmark = pytest.mark.pure


def test_sums_over_ranks() -> None:
    first = TierStats(
        device_bytes=1, host_bytes=20, disk_bytes=300, expert_hits=3, expert_misses=1, read_bytes=100, read_seconds=0.5
    )
    second = TierStats(host_bytes=5, expert_hits=1, expert_misses=3, expert_foreseen=2, read_bytes=300, read_seconds=1.5)
    found = total_tiers([first, None, second])
    assert found is not None
    assert (found.device_bytes, found.host_bytes, found.disk_bytes) == (1, 25, 300)
    assert found.hit_rate == 0.5 and found.read_bytes_per_second == 200 and found.expert_foreseen == 2


def test_nothing_is_offloaded() -> None:
    assert total_tiers([None, None]) is None and total_tiers([]) is None
