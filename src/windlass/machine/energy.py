"""Energy counters of this machine's processors (RAPL: kernel.org, power/powercap/powercap)."""

from __future__ import annotations

from pathlib import Path

from windlass.machine.proc import ReadText, read_text

RAPL = "/sys/class/powercap"


def counter_delta(before: int, after: int, highest: int) -> int:
    """Growth of a counter that wraps around at `highest`."""
    return after - before if after >= before else after + highest - before


class RaplMonitor:
    """Energy of the CPU packages, from RAPL counters; on most machines only root can read them."""

    def __init__(self, read: ReadText = read_text, folder: str = RAPL) -> None:
        self._read = read
        names = sorted(path.name for path in Path(folder).glob("intel-rapl:?")) if Path(folder).is_dir() else []
        self._folders = [f"{folder}/{name}" for name in names]
        self._last = [self._counter(path) for path in self._folders]
        self._joules = 0.0

    @property
    def is_readable(self) -> bool:
        return bool(self._last) and all(value is not None for value in self._last)

    def _counter(self, folder: str) -> int | None:
        text = self._read(f"{folder}/energy_uj").strip()
        return int(text) if text.isdecimal() else None

    def joules(self) -> float | None:
        if not self.is_readable:
            return None
        for index, folder in enumerate(self._folders):
            now, before = self._counter(folder), self._last[index]
            if now is not None and before is not None:
                highest = self._read(f"{folder}/max_energy_range_uj").strip()
                self._joules += counter_delta(before, now, int(highest) if highest.isdecimal() else 0) / 1e6
                self._last[index] = now
        return self._joules
