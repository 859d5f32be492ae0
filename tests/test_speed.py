"""bench/speed.py: its rows are named, kept, and compared with the same machine's only. What they say is nobody's business here."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.pure


@pytest.fixture(scope="module")
def speed() -> ModuleType:
    found = importlib.util.spec_from_file_location("bench_speed", Path(__file__).parents[1] / "bench" / "speed.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def row(name: str, seconds: float, machine: str = "here", date: str = "2026-01-01") -> dict[str, object]:
    return {"date": date, "commit": "c", "machine": machine, "name": name, "seconds": seconds}


def test_the_last_run_of_the_same_machine_is_what_is_compared_with(speed: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "new" / "speed.jsonl"
    speed.append_history(path, [row("a", 4.0), row("b", 1.0)])
    speed.append_history(path, [row("a", 2.0, date="2026-01-02"), row("a", 9.0, machine="there")])
    with path.open("a") as stream:
        stream.write('{"date": "20')
    assert speed.last_seconds(speed.read_history(path), "here") == {"a": 2.0, "b": 1.0}
    assert speed.read_history(tmp_path / "none") == []
    assert "0.50 x" in speed.line("a", 1.0, 2.0) and " x" not in speed.line("a", 1.0, None)


def test_a_run_is_printed_and_kept(
    speed: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best of the rounds; what cannot be measured here is said and not kept."""
    seconds = iter([3.0, 2.0, 5.0, 1.0, 4.0, 4.0])

    def absent() -> float:
        raise speed.NotHere("no such model")

    monkeypatch.setattr(speed, "everything", lambda: {"row one": lambda: next(seconds), "row two": absent, "other": absent})
    monkeypatch.setattr(sys, "argv", ["speed.py", "row", "--compare", "--history", str(tmp_path / "kept")])
    assert speed.main() == speed.main() == 0
    kept = [json.loads(line) for line in (tmp_path / "kept").read_text().splitlines()]
    assert [found["seconds"] for found in kept] == [2.0, 1.0] and kept[0].keys() == row("", 0).keys()
    printed = capsys.readouterr().out
    assert printed.count("no such model") == 2 and printed.count("0.50 x") == 1 and "other" not in printed


def test_every_file_beside_it_gives_rows(speed: ModuleType) -> None:
    found = speed.measurements()
    assert len(found) >= 12 and all(map(callable, found.values()))
    for file in (Path(__file__).parents[1] / "bench").glob("speed_*.py"):
        assert "def measurements()" in file.read_text(), file
