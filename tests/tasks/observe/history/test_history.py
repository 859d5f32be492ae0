"""A day of samples: bounded, thinned, and read back from its file whatever happened to it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.model.formats.disk.atomic import write_atomically
from windlass.tasks.observe.history.file import MAGIC, HistoryFile, read_history
from windlass.tasks.observe.history.series import COARSE_SECONDS, DAY_SECONDS, FINE_SECONDS, SeriesStore, is_end

pytestmark = pytest.mark.pure
LABELS = (("job", "j"),)


def _values(store: SeriesStore, name: str = "a") -> list[tuple[float, float]]:
    found = next(series for one, _, series in store.all() if one == name)
    return list(zip(found.times, found.values, strict=True))


def test_old_samples_are_thinned_and_forgotten() -> None:
    store = SeriesStore()
    now = 1.5 * DAY_SECONDS
    for second in range(0, int(now), 15):
        store.add("a", LABELS, float(second), second)
        if second % 14400 == 0:
            store.thin(float(second))
    store.thin(now + COARSE_SECONDS)
    times = [time for time, _ in _values(store)]
    assert times[0] >= now - DAY_SECONDS - 60
    assert len(times) < 2000 and len([time for time in times if time > now - FINE_SECONDS + 60]) > 450


def test_series_are_bounded() -> None:
    store = SeriesStore(max_series=10)
    for number in range(100):
        store.add("a", (("x", str(number)),), 1.0, 1.0)
    assert store.num_series == 10 and store.num_dropped == 90


def test_a_clock_that_is_set_back_adds_nothing() -> None:
    store = SeriesStore()
    for time in (10.0, 5.0, 11.0):
        store.add("a", LABELS, time, time)
    assert [time for time, _ in _values(store)] == [10.0, 11.0]


def _write(path: Path, rounds: list[list[float | None]], begin: float) -> None:
    file = HistoryFile(path, write_atomically)
    store = file.load(begin)
    for index, values in enumerate(rounds):
        time = begin + 15.0 * (index + 1)
        for number, value in enumerate(values):
            if value is None:
                store.end("a", (("n", str(number)),), time)
            else:
                store.add("a", (("n", str(number)),), time, value)
        file.append(store, time)
    file.close()


ROUNDS = st.lists(st.lists(st.one_of(st.floats(allow_nan=False), st.none()), min_size=3, max_size=3), min_size=1, max_size=8)


@given(ROUNDS)
def test_what_was_written_is_read(tmp_path_factory: pytest.TempPathFactory, rounds: list[list[float | None]]) -> None:
    path = tmp_path_factory.mktemp("history") / "history"
    _write(path, rounds, 1000.0)
    store = read_history(path, 2000.0)
    for number in range(3):
        expected = {
            1000.0 + 15.0 * (index + 1): values[number] for index, values in enumerate(rounds) if values[number] is not None
        }
        if (("n", str(number)),) in store.names("a"):
            found = dict(store.points("a", (("n", str(number)),), 0.0, 5000.0))
            assert found == expected
        else:
            assert expected == {}


@pytest.mark.parametrize("cut", [1, 5, 13, 40])
def test_a_torn_or_foreign_file_is_no_error(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "history"
    _write(path, [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], 1000.0)
    content = path.read_bytes()
    path.write_bytes(content[:-cut])
    found = read_history(path, 2000.0)
    assert _values(found)[0] == (1015.0, 1.0)
    path.write_bytes(b"something else entirely")
    assert list(read_history(path, 2000.0).all()) == []


def test_the_file_stays_small(tmp_path: Path) -> None:
    path = tmp_path / "history"
    file = HistoryFile(path, write_atomically, max_bytes=40_000)
    store = file.load(0.0)
    largest = 0
    for index in range(1, 1200):
        for number in range(5):
            store.add("a", (("n", str(number)),), 15.0 * index, float(index * number))
        store.thin(15.0 * index)
        file.append(store, 15.0 * index)
        largest = max(largest, path.stat().st_size)
    file.close()
    assert largest < 120_000
    assert path.read_bytes().startswith(MAGIC) and path.stat().st_mode & 0o077 == 0


def test_nothing_is_known_of_the_time_between_two_runs(tmp_path: Path) -> None:
    path = tmp_path / "history"
    _write(path, [[1.0, 1.0, 1.0]], 1000.0)
    file = HistoryFile(path, write_atomically)
    store = file.load(5000.0)
    assert all(is_end(series.values[-1]) for _, _, series in store.all())
    store.add("b", LABELS, 5000.0, 1.0)
    file.append(store, 5000.0)
    file.close()
    again = read_history(path, 6000.0)
    assert again.latest("a", (("n", "0"),), 4000.0, 5000.0) is None and again.latest("b", LABELS, 4000.0, 5000.0) == 1.0


def test_a_full_disk_loses_history_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    file = HistoryFile(tmp_path / "file" / "history", write_atomically)
    store = file.load(0.0)
    store.add("a", LABELS, 1.0, math.nan)
    file.append(store, 1.0)
    assert file.num_lost >= 1
