"""Numbers about the machine, from the text the system gives."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from windlass.runtime.machine.energy import RaplMonitor, counter_delta
from windlass.runtime.machine.memory import process_memory, process_tree
from windlass.tasks.serve.monitor.resources import ResourceMonitor, busy_percent, cpu_times

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("stat", "times"),
    [
        ("cpu  100 5 45 800 40 3 7 0 0 0\ncpu0 1 1\n", (160, 1000)),
        ("cpu 1 2 3\n", (0, 0)),
        ("", (0, 0)),
    ],
)
def test_ticks(stat: str, times: tuple[int, int]) -> None:
    assert cpu_times(stat) == times


@pytest.mark.parametrize(
    ("before", "after", "percent"), [((0, 0), (50, 100), 50.0), ((50, 100), (50, 200), 0.0), ((5, 10), (5, 10), None)]
)
def test_share_of_ticks(before: tuple[int, int], after: tuple[int, int], percent: float | None) -> None:
    assert busy_percent(before, after) == percent


@pytest.mark.parametrize(("before", "after", "growth"), [(5, 9, 4), (95, 4, 9), (5, 5, 0)])
def test_a_counter_that_began_again(before: int, after: int, growth: int) -> None:
    assert counter_delta(before, after, 100) == growth


def test_this_process_is_among_its_own() -> None:
    assert process_tree(os.getpid(), lambda _: "") == [os.getpid()]
    assert process_memory().resident_bytes > 2**20


def test_joules_are_those_since_the_start(tmp_path: Path) -> None:
    for name, value in (("intel-rapl:0", 1_000_000), ("intel-rapl:1", 5_000_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{value}\n")
        (tmp_path / name / "max_energy_range_uj").write_text("9000000\n")

    def read(path: str) -> str:
        return Path(path).read_text() if Path(path).is_file() else ""

    meter = RaplMonitor(read, str(tmp_path))
    assert meter.joules() == 0
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("3000000")
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("1000000")
    assert meter.joules() == pytest.approx(2.0 + 5.0)
    assert RaplMonitor(lambda _: "", str(tmp_path)).joules() is None
    assert RaplMonitor(read, str(tmp_path / "nothing")).joules() is None


def test_a_look_at_this_machine() -> None:
    machine = ResourceMonitor(planned_bytes=(123,))
    first = machine.now()
    assert machine.now() is first  # at most once a second
    assert 0 < first.memory_bytes < first.memory_total_bytes and first.process_bytes > 2**20
    assert first.devices[0].planned_bytes == 123
