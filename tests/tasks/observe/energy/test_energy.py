"""Energy of runs from their logs and histories."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.cli.observe.energy import EnergyOptions, rows, show_energy
from windlass.core.hardware.energy import grid
from windlass.core.hardware.hourly import HourlyGrid
from windlass.errors import BadInput
from windlass.model.formats.disk.atomic import write_atomically
from windlass.tasks.observe.energy.reading import report_of
from windlass.tasks.observe.energy.report import counter_growth, hours_of, train_report, with_carbon, with_hourly_carbon
from windlass.tasks.observe.history.file import HistoryFile

pytestmark = pytest.mark.pure


def _step(step: int, joules: float | None, at: float) -> dict[str, object]:
    return {
        "step": step,
        "seconds": 8.0,
        "tokens": 1000 * step,
        "energy_joules": joules,
        "energy_source": "nvml" if joules else "",
        "time": at,
    }


def test_a_counter_that_begins_anew() -> None:
    assert counter_growth([10.0, 30.0, 5.0, 25.0]) == 55.0 and counter_growth([]) == 0.0


def test_a_run_with_a_counter() -> None:
    samples = [_step(step, 4000.0 * step, 10.0 * step) for step in range(1, 11)]
    report = with_carbon(train_report("r", samples, None), grid("FRA"), 1.2)
    assert report.method == "counter" and report.joules == 40_000 and report.uncertainty == 0.05
    assert report.joules_per_token == 4.0 and report.kwh == pytest.approx(40_000 / 3.6e6 * 1.2)
    assert sum(report.by_use.values()) == pytest.approx(40_000) and report.by_use["steps"] < 40_000
    assert (
        report.co2_grams == pytest.approx(report.kwh * grid("FRA").grams_per_kwh)
        and "average, location-based" in dict(rows(report))["CO2e"]
    )


def test_without_a_counter_it_says_so_or_estimates() -> None:
    samples = [_step(step, None, 10.0 * step) for step in range(1, 11)]
    assert train_report("r", samples, None).method == "unknown"
    estimated = train_report("r", samples, 500.0)
    assert estimated.joules == 40_000 and estimated.method == "estimated" and estimated.uncertainty == 0.4


def test_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.jsonl").write_text(
        "".join(json.dumps(_step(step, 100.0 * step, 10.0 * step)) + "\n" for step in (1, 2)) + "{torn"
    )
    assert show_energy(tmp_path, EnergyOptions(region="DEU", as_json=True)) == 0
    assert json.loads(capsys.readouterr().out)["joules"] == 200.0
    assert show_energy(tmp_path, EnergyOptions()) == 0 and "counter: nvml" in capsys.readouterr().out
    with pytest.raises(BadInput, match=r"log\.jsonl"):
        report_of(tmp_path / "nothing", None)
    with pytest.raises(BadInput, match="--pue"):
        show_energy(tmp_path, EnergyOptions(pue=0.5))


def test_from_a_servers_history(tmp_path: Path) -> None:
    path, now = tmp_path / "history", time.time() - 1000
    file = HistoryFile(path, write_atomically)
    store = file.load(now)
    for index in range(1, 20):
        for use, watts in (("requests", 30.0), ("idle", 10.0)):
            store.add("windlass_energy_joules_total", (("use", use),), now + 15 * index, 15 * watts * index)
        store.add("windlass_generation_tokens_total", (), now + 15 * index, 150.0 * index)
        file.append(store, now + 15 * index)
    file.close()
    report = report_of(path, None)
    assert (
        report.by_use == pytest.approx({"requests": 8100.0, "idle": 2700.0})
        and report.tokens == 2700
        and report.joules_per_token == pytest.approx(4.0)
    )


def test_carbon_by_the_hour() -> None:
    """Two hours, one with twice the energy and a tenth of the intensity: the mean is weighted by energy."""
    hour = 480_000
    samples = [_step(1, 1000.0, hour * 3600.0 + 10), _step(2, 3000.0, (hour + 1) * 3600.0 + 10)]
    report = train_report("r", samples, None)
    assert report.by_hour == {hour: 1000.0, hour + 1: 2000.0}
    found = with_hourly_carbon(report, HourlyGrid(name="g.csv", by_time={hour: 500.0, hour + 1: 50.0}), 1.0)
    assert found.grams_per_kwh == 200.0 and found.co2_grams == pytest.approx(3000 / 3.6e6 * 200)
    assert "by the hour (2 hours)" in dict(rows(found))["CO2e"]
    with pytest.raises(BadInput, match="1 of the run's 2 hours"):
        with_hourly_carbon(report, HourlyGrid(name="g.csv", by_time={hour: 500.0}), 1.0)
    with pytest.raises(BadInput, match="no times"):
        with_hourly_carbon(train_report("r", [_step(1, 5.0, 0.0)], None), HourlyGrid(name="g", by_time={hour: 1.0}), 1.0)
    estimated = train_report("r", [_step(step, None, one["time"]) for step, one in enumerate(samples, 1)], 100.0)  # type: ignore[arg-type]
    assert estimated.by_hour == {hour: 800.0, hour + 1: 800.0}


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 1e9)), min_size=1, max_size=30))
def test_hours_add_up_to_the_counter(read: list[tuple[int, float]]) -> None:
    read = sorted(read)
    assert sum(hours_of(read).values()) == pytest.approx(counter_growth([joules for _, joules in read]), rel=1e-9, abs=1e-6)


def test_a_file_by_the_hour(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.jsonl").write_text(json.dumps(_step(1, 3.6e6, 1000 * 3600.0 + 5)) + "\n")
    (tmp_path / "day.csv").write_text("hour,grams\n" + "".join(f"{hour},{hour * 10}\n" for hour in range(24)))
    assert show_energy(tmp_path, EnergyOptions(intensity=tmp_path / "day.csv", as_json=True)) == 0
    assert json.loads(capsys.readouterr().out)["co2_grams"] == pytest.approx(10.0 * (1000 % 24))
    with pytest.raises(BadInput, match="contradict"):
        show_energy(tmp_path, EnergyOptions(intensity=tmp_path / "day.csv", grams=5.0))
    with pytest.raises(BadInput, match="cannot read"):
        show_energy(tmp_path, EnergyOptions(intensity=tmp_path / "none.csv"))
