"""Carbon intensity of a grid by the hour, from a file that the user gives. Pure.

No table by the hour is shipped: those that cover many regions (Electricity Maps) are under a database licence that asks for the same of whatever
contains them, or are services. Two forms are read: 24 lines `HOUR,GRAMS` for the hours of a day in UTC, or lines `TIME,GRAMS` for given hours.
A file with a heading may have other columns too, as Electricity Maps' export does.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from windlass.core.model import Frozen
from windlass.errors import BadInput

HOUR = 3600
MOST_GRAMS = 5000.0
TIME_NAMES, INTENSITY_NAMES = (
    ("datetime", "timestamp", "time", "hour"),
    ("life cycle", "lca", "carbon intensity", "gco2", "grams", "g/kwh"),
)
"""Parts of headings, the best first: what a life cycle emits is what yearly tables count."""


class HourlyGrid(Frozen):
    name: str
    by_time: Mapping[int, float] = {}
    """g CO2e per kWh by hours since 1970."""
    by_hour_of_day: Mapping[int, float] = {}
    """By hour in UTC, where `by_time` is empty."""

    def at(self, epoch_seconds: float) -> float | None:
        """None: the file does not have that hour."""
        hour = int(epoch_seconds // HOUR)
        return self.by_hour_of_day.get(hour % 24) if self.by_hour_of_day else self.by_time.get(hour)


def parse_hourly(text: str, name: str) -> HourlyGrid:
    rows = _rows(text, name)
    if not rows:
        raise BadInput(f"{name} is empty: give lines HOUR,GRAMS or TIME,GRAMS")
    columns = _columns(rows[0][1], name)
    if columns is not None:
        rows = rows[1:]
    if not rows:
        raise BadInput(f"{name} has a heading and nothing below it")
    when, what = columns or (0, 1)
    found = [
        (number, _cell(row, when, number, name), _grams(_cell(row, what, number, name), number, name)) for number, row in rows
    ]
    if all(time.isdecimal() for _, time, _ in found):
        return HourlyGrid(name=name, by_hour_of_day=_day(found, name))
    return HourlyGrid(name=name, by_time=_times(found, name))


def _rows(text: str, name: str) -> list[tuple[int, list[str]]]:
    try:
        return [(number, row) for number, row in enumerate(csv.reader(text.splitlines()), start=1) if row and row[0].strip()]
    except csv.Error as error:
        raise BadInput(f"{name} is not CSV: {error}") from None


def _columns(heading: Sequence[str], name: str) -> tuple[int, int] | None:
    """None: the first line is no heading."""
    words = [word.strip().lower() for word in heading]
    if words[0][:1].isdigit():
        return None
    when, what = _first(words, TIME_NAMES), _first(words, INTENSITY_NAMES)
    if when is None or what is None:
        raise BadInput(f"{name}: no column of times and of carbon intensity among {', '.join(heading)}")
    return when, what


def _first(words: Sequence[str], names: Sequence[str]) -> int | None:
    return next((place for name in names for place, word in enumerate(words) if name in word), None)


def _cell(row: Sequence[str], place: int, number: int, name: str) -> str:
    if place >= len(row):
        raise BadInput(f"{name}, line {number}: it has {len(row)} columns; expected HOUR,GRAMS or TIME,GRAMS")
    return row[place].strip()


def _grams(text: str, number: int, name: str) -> float:
    try:
        grams = float(text)
    except ValueError:
        grams = math.nan
    if not 0 <= grams <= MOST_GRAMS:
        raise BadInput(f"{name}, line {number}: {text!r} is no intensity in g CO2e per kWh (0 to {MOST_GRAMS:g})")
    return grams


def _day(found: Sequence[tuple[int, str, float]], name: str) -> dict[int, float]:
    hours = {int(time): grams for _, time, grams in found}
    if sorted(hours) != list(range(24)) or len(found) != 24:
        raise BadInput(f"{name}: hours of a day are 0 to 23, each once; it has {len(found)} lines for {len(hours)} hours")
    return hours


def _times(found: Sequence[tuple[int, str, float]], name: str) -> dict[int, float]:
    """The mean of an hour's lines: some sources have one for every quarter or half hour."""
    by_hour: dict[int, list[float]] = {}
    for number, time, grams in found:
        by_hour.setdefault(_hour(time, number, name), []).append(grams)
    return {hour: sum(values) / len(values) for hour, values in by_hour.items()}


def _hour(text: str, number: int, name: str) -> int:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise BadInput(
            f"{name}, line {number}: {text!r} is neither an hour of the day nor a time such as 2026-11-16T14:00"
        ) from None
    return int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() // HOUR)
