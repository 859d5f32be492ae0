"""Energy of this machine: counters where the kernel or the driver has them, rated power times time elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

RAPL = Path("/sys/class/powercap")
"""Running average power limit: processor packages count their microjoules (kernel.org, power/powercap/powercap)."""


class EnergyMeter:
    """`watts`: rated power, for machines without counters; None: unknown."""

    def __init__(self, watts: float | None, clock: Callable[[], float] = time.monotonic, folder: Path = RAPL) -> None:
        self._clock, self._watts = clock, watts
        self._packages = _packages(folder)
        self._last, self._last_at = self._read(), clock()

    @property
    def how(self) -> str:
        if self._packages:
            return "processor counters (RAPL)"
        return "unknown" if self._watts is None else f"estimated at {self._watts:g} W"

    def lap(self) -> float | None:
        """Joules since the last call."""
        now, at = self._read(), self._clock()
        if self._packages and self._last is not None and now is not None:
            used = sum(max(new - old, 0) for new, old in zip(now, self._last, strict=True)) / 1e6
        else:
            used = None if self._watts is None else self._watts * (at - self._last_at)
        self._last, self._last_at = now, at
        return used

    def _read(self) -> list[int] | None:
        try:
            return [int(path.read_text()) for path in self._packages]
        except (OSError, ValueError):
            return None


def _packages(folder: Path) -> list[Path]:
    found: list[Path] = []
    for path in sorted(folder.glob("intel-rapl:[0-9]")):
        try:
            int((path / "energy_uj").read_text())
        except (OSError, ValueError):
            continue
        found.append(path / "energy_uj")
    return found
