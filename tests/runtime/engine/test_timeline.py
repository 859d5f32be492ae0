"""A start's timeline: written where it is asked for, read in the order of time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from windlass.runtime.engine import timeline

pytestmark = pytest.mark.pure


def test_marks_of_several_processes_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "timeline"
    monkeypatch.setenv(timeline.VARIABLE, str(file))
    before = time.time()
    timeline.mark("now")
    timeline.mark("an hour ago: first byte", time.monotonic() - 3600)
    first, last = timeline.parse(file.read_text())
    assert (first.what, last.what) == ("an hour ago: first byte", "now")
    assert abs(first.seconds + 3600 - before) < 60 and first.peak_bytes > 2**20


def test_nothing_is_written_where_nobody_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(timeline.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    timeline.mark("now")
    assert list(tmp_path.iterdir()) == []
