"""Energy of runs from their logs and histories."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from windlass.cli.observe.energy import EnergyOptions, rows, show_energy
from windlass.core.hardware.energy import grid
from windlass.errors import BadInput
from windlass.formats.disk.atomic import write_atomically
from windlass.observe.energy.reading import report_of
from windlass.observe.energy.report import counter_growth, train_report, with_carbon
from windlass.observe.history.file import HistoryFile

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
