"""What was measured is kept in one file, replaced by newer runs, and never a reason to fail."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from windlass.core.hardware.measured import MeasuredLimits, MeasuredRun
from windlass.tasks.bench import kept

pytestmark = pytest.mark.cpu

RUN = MeasuredRun(
    machine="here", model="m", engine="windlass", scheme="int4", batch=1, prompt_tokens=128, new_tokens=128, decode_tokens_per_second=9.0,
    prefill_tokens_per_second=40.0, date="2026-11-16",
)  # fmt: skip


def test_newer_runs_replace_older_ones_of_the_same_work() -> None:
    other = msgspec.structs.replace(RUN, batch=8)
    found = kept.with_runs(
        kept.with_runs(kept.Measured(), (RUN, other)), (msgspec.structs.replace(RUN, decode_tokens_per_second=10.0),)
    )
    assert [(run.batch, run.decode_tokens_per_second) for run in found.runs] == [(8, 9.0), (1, 10.0)]
    many = kept.with_runs(found, tuple(msgspec.structs.replace(RUN, batch=batch) for batch in range(1, 300)))
    assert len(many.runs) == kept.MOST_RUNS
    assert kept.runs_of(found, "elsewhere") == ()


def test_there_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / "new"))
    assert kept.load() == kept.Measured()
    limits = MeasuredLimits(read_bytes_per_second=1e9, matmul_flops=1e10, date="2026-11-16")
    kept.save(kept.with_limits(kept.with_runs(kept.Measured(), (RUN,)), "here", limits))
    assert kept.load().runs == (RUN,) and kept.load().limits == {"here": limits}
    assert [file.name for file in (tmp_path / "new").iterdir()] == [kept.FILE]


def test_a_broken_file_or_folder_is_no_reason_to_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path))
    kept.path().write_text("{")
    assert kept.load() == kept.Measured()
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / kept.FILE / "below"))
    kept.save(kept.Measured(runs=(RUN,)))


def test_opting_out() -> None:
    assert kept.wanted({}) and not kept.wanted({"WINDLASS_KEEP_MEASURED": "0"})


def test_calibration_of_this_machine(tmp_path: Path) -> None:
    from windlass.tasks.bench.calibrate import calibrate

    told: list[str] = []
    found = calibrate("cpu", 1, tmp_path, told.append)
    assert found.read_bytes_per_second > 1e8 and found.matmul_flops > 1e8 and found.launch_seconds > 0
    assert told == ["memory and products", "disk", "launches"]
