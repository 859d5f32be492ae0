"""Samples of a day: all of the last two hours, one a minute before that. Bounded in series and in points; what would be more is counted."""

from __future__ import annotations

import math
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from windlass.core.metrics.exposition import Labels

Points = Sequence[tuple[float, float]]
"""(time, value), oldest first."""
DAY_SECONDS = 86400.0
FINE_SECONDS = 7200.0
COARSE_SECONDS = 60.0
MAX_SERIES = 1000
ENDED = struct.unpack("<d", struct.pack("<Q", 0x7FF0000000000002))[0]
"""Prometheus' mark that a series has ended: a NaN with bits of its own (model/value/value.go)."""
_ENDED_BITS = struct.pack("<Q", 0x7FF0000000000002)


def is_end(value: float) -> bool:
    return math.isnan(value) and struct.pack("<d", value) == _ENDED_BITS


class Series:
    __slots__ = ("times", "values")

    def __init__(self) -> None:
        self.times, self.values = array("d"), array("d")

    def add(self, time: float, value: float) -> None:
        if self.times and time <= self.times[-1]:  # a clock that was set back
            return
        self.times.append(time)
        self.values.append(value)

    @property
    def has_ended(self) -> bool:
        return bool(self.values) and is_end(self.values[-1])

    def between(self, start: float, end: float) -> tuple[int, int]:
        """Indexes of start < time <= end."""
        return bisect_right(self.times, start), bisect_right(self.times, end)

    def thin(self, oldest: float, fine: float) -> None:
        """Forgets what is older than `oldest`; before `fine`, keeps the last of every minute."""
        times, values = array("d"), array("d")
        for index, time in enumerate(self.times):
            is_last = index + 1 == len(self.times)
            same = not is_last and time < fine and self.times[index + 1] // COARSE_SECONDS == time // COARSE_SECONDS
            if time >= oldest and (not same or is_end(self.values[index])):
                times.append(time)
                values.append(self.values[index])
        self.times, self.values = times, values


class SeriesStore:
    """Samples by the name and the labels of their series."""

    def __init__(self, max_series: int = MAX_SERIES) -> None:
        self._by_name: dict[str, dict[Labels, Series]] = {}
        self._max_series = max_series
        self.num_series = 0
        self.num_dropped = 0
        """Samples of series beyond the limit."""
        self._thinned_at = 0.0

    def add(self, name: str, labels: Labels, time: float, value: float) -> None:
        series = self._find(name, labels)
        if series is None:
            self.num_dropped += 1
        else:
            series.add(time, value)

    def end(self, name: str, labels: Labels, time: float) -> None:
        """No sample this time: its target or its label is gone."""
        series = self._by_name.get(name, {}).get(labels)
        if series is not None and series.values and not series.has_ended:
            series.add(time, ENDED)

    def _find(self, name: str, labels: Labels) -> Series | None:
        found = self._by_name.setdefault(name, {}).get(labels)
        if found is None and self.num_series < self._max_series:
            found = self._by_name[name][labels] = Series()
            self.num_series += 1
        return found

    def thin(self, now: float) -> None:
        """At most once a minute."""
        if 0 <= now - self._thinned_at < COARSE_SECONDS:
            return
        self._thinned_at = now
        for name in list(self._by_name):
            for labels, series in list(self._by_name[name].items()):
                if series.times and series.times[0] < now - FINE_SECONDS:
                    series.thin(now - DAY_SECONDS, now - FINE_SECONDS)
                if not series.times:
                    del self._by_name[name][labels]
                    self.num_series -= 1

    def all(self) -> Iterator[tuple[str, Labels, Series]]:
        for name, found in self._by_name.items():
            for labels, series in found.items():
                yield name, labels, series

    # --- for conditions

    def names(self, name: str) -> Sequence[Labels]:
        """The labels of every series of that name."""
        return list(self._by_name.get(name, ()))

    def points(self, name: str, labels: Labels, start: float, end: float) -> Points:
        """After `start`, up to and with `end`, without marks of an end."""
        series = self._by_name[name][labels]
        first, stop = series.between(start, end)
        pairs = zip(series.times[first:stop], series.values[first:stop], strict=True)
        return [(time, value) for time, value in pairs if value == value or not is_end(value)]

    def latest(self, name: str, labels: Labels, start: float, end: float) -> float | None:
        """None: there is none, or the series has ended since."""
        series = self._by_name[name][labels]
        first, stop = series.between(start, end)
        if stop <= first:
            return None
        value = series.values[stop - 1]
        return None if is_end(value) else value
