"""A healthy hour: serve, train and node under real Prometheus, no alarm, and neither memory nor series grow. WINDLASS_SOAK_MINUTES sets the time."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from rig import MISSING, has_stack, rig

from windlass.runtime.machine.memory import process_memory
from windlass.tasks.observe.rules.all_rules import all_groups
from windlass.tasks.observe.scrape import Source, http_source
from windlass.tasks.observe.watch import Watch
from windlass.units import MIB

pytestmark = [pytest.mark.multi, pytest.mark.long, pytest.mark.skipif(not has_stack(), reason=MISSING)]
MINUTES = float(os.environ.get("WINDLASS_SOAK_MINUTES", "60"))
EXPECTED = {"WindlassEnergyBudget"}
"""The rig's budget is one watt, so that the rule has something to read."""


def test_no_false_alarm_and_nothing_grows(tmp_path: Path) -> None:
    with rig(tmp_path, all_groups(), scrape_seconds=5.0, quick=False) as made:
        own = Watch(_sources(made.stack.targets.jobs))
        ends = time.monotonic() + 60 * MINUTES
        series: list[float] = []
        resident: list[int] = []
        false: set[str] = set()
        while time.monotonic() < ends:
            time.sleep(15)
            own.tick()
            false |= made.firing() - EXPECTED
            false |= {alert.name for alert in own.evaluation.firing} - EXPECTED
            series.append(float(made.query("sum(scrape_samples_scraped)")[0]["value"][1]))
            resident.append(process_memory().resident_bytes)
        half = len(series) // 2
        print(
            f"{MINUTES:g} minutes, alarms {sorted(false)}, webhook {sorted(made.hook.seen)}; series {min(series):.0f} to {max(series):.0f}, "
            f"second half {series[half]:.0f} to {series[-1]:.0f}; resident MiB {resident[0] // MIB}, {resident[half] // MIB}, {resident[-1] // MIB}"
        )
        assert false == set()
        assert {name for name, _, _ in made.hook.seen} <= EXPECTED
        assert max(series[half:]) <= series[max(half - 1, 0)] + 20, series
        # The first half fills histories and pools; after it, a few MiB of noise are allowed.
        assert resident[-1] - resident[half] < 16 * MIB, [one // MIB for one in resident]


def _sources(jobs: dict[str, tuple[str, ...]]) -> list[Source]:
    return [http_source(job, address) for job, addresses in jobs.items() for address in addresses]
