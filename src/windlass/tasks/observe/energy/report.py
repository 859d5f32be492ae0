"""Samples of a run to a report. Pure.

Uncertainty, by method. counter: NVML's power is within about 5 % on data-centre cards (NVIDIA's documentation of nvmlDeviceGetPowerUsage
says +/- 5 %), RAPL's is of the packages alone; what neither counts (fans, disks, power supplies) comes on top. estimated: rated power
times time; CodeCarbon, which does the same without counters, was up to 40 % off a wall meter over hundreds of runs (arXiv 2509.22092).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Literal

from windlass.core.hardware.energy import Grid, co2_kg
from windlass.core.hardware.hourly import HOUR, HourlyGrid
from windlass.core.model import Frozen
from windlass.errors import BadInput

JOULES_PER_KWH = 3.6e6
COUNTER_ERROR, ESTIMATE_ERROR = 0.05, 0.4
Method = Literal["counter", "estimated", "unknown"]


class EnergyReport(Frozen):
    what: str
    method: Method
    source: str
    """Which counters, or what was assumed."""
    joules: float | None
    uncertainty: float | None
    """Relative."""
    seconds: float
    by_use: dict[str, float] = {}
    """Joules by what they were used for."""
    tokens: int = 0
    num_correct: int | None = None
    kwh: float | None = None
    """With the data centre's overhead."""
    co2_grams: float | None = None
    grid: str = ""
    grams_per_kwh: float | None = None
    intensity: str = "average, location-based"
    by_hour: dict[int, float] = {}
    """Joules by hours since 1970, where the times are known."""

    @property
    def watts(self) -> float | None:
        return None if self.joules is None or not self.seconds else self.joules / self.seconds

    @property
    def joules_per_token(self) -> float | None:
        return None if self.joules is None or not self.tokens else self.joules / self.tokens


def train_report(what: str, samples: Sequence[dict[str, Any]], watts: float | None) -> EnergyReport:
    """`samples`: lines of a run's log. The counter begins anew with every process; what ran between processes is not known."""
    steps = [one for one in samples if isinstance(one.get("step"), int)]
    seconds = sum(float(one.get("seconds") or 0.0) for one in steps)
    tokens = max((int(one.get("tokens") or 0) for one in steps), default=0)
    counted = [float(one["energy_joules"]) for one in steps if one.get("energy_joules") is not None]
    if counted:
        joules = counter_growth(counted)
        wall = sum(max(float(new.get("time") or 0) - float(old.get("time") or 0), 0.0) for old, new in pairwise(steps)) or seconds
        source = next(str(one["energy_source"]) for one in steps if one.get("energy_source"))
        in_steps = joules * min(seconds / wall, 1.0) if wall else joules
        uses = {"steps": in_steps, "between steps (checkpoints, validation)": joules - in_steps}
        return EnergyReport(
            what=what,
            method="counter",
            source=f"{source}, of rank 0's machine",
            joules=joules,
            uncertainty=COUNTER_ERROR,
            seconds=max(wall, seconds),
            tokens=tokens,
            by_use=uses,
            by_hour=hours_of(
                [
                    (float(one.get("time") or 0.0), float(one["energy_joules"]))
                    for one in steps
                    if one.get("energy_joules") is not None
                ]
            ),
        )
    return _estimated(what, steps, seconds, tokens, watts)


def counter_growth(values: Sequence[float]) -> float:
    """A value below the one before is of a new process, which began at 0."""
    return values[0] + sum(new - old if new >= old else new for old, new in pairwise(values)) if values else 0.0


def hours_of(counted: Sequence[tuple[float, float]]) -> dict[int, float]:
    """A counter's growth by the hour in which it was read; (time, joules) in order. Times of 0 are not known."""
    found: dict[int, float] = {}
    before = 0.0
    for time, joules in counted:
        grown, before = joules - before if joules >= before else joules, joules
        if time > 0:
            found[int(time // HOUR)] = found.get(int(time // HOUR), 0.0) + grown
    return found


def _estimated(what: str, steps: Sequence[dict[str, Any]], seconds: float, tokens: int, watts: float | None) -> EnergyReport:
    by_hour: dict[int, float] = {}
    for one in steps if watts is not None else ():
        hour = int(float(one.get("time") or 0.0) // HOUR)
        by_hour[hour] = by_hour.get(hour, 0.0) + (watts or 0.0) * float(one.get("seconds") or 0.0)
    by_hour.pop(0, None)
    joules = None if watts is None else watts * seconds
    return EnergyReport(
        what=what,
        method="unknown" if joules is None else "estimated",
        source="no counter was readable; give --watts" if watts is None else f"{watts:g} W for the time of its steps",
        joules=joules,
        uncertainty=None if joules is None else ESTIMATE_ERROR,
        seconds=seconds,
        tokens=tokens,
        by_hour=by_hour,
    )


def serve_report(what: str, by_use: dict[str, float], seconds: float, tokens: int, by_hour: dict[int, float]) -> EnergyReport:
    """From the history of a server: increases over the time that it holds."""
    return EnergyReport(
        what=what,
        method="counter" if by_use else "unknown",
        source="the machine's counters, divided by tokens computed" if by_use else "no counter was readable on that machine",
        joules=sum(by_use.values()) if by_use else None,
        uncertainty=COUNTER_ERROR if by_use else None,
        seconds=seconds,
        by_use=by_use,
        tokens=tokens,
        by_hour=by_hour,
    )


def with_hourly_carbon(report: EnergyReport, grid: HourlyGrid, pue: float) -> EnergyReport:
    """Each hour's energy by that hour's intensity. Refuses if an hour of the run has none: a guess would look like a figure."""
    import msgspec

    if report.joules is None:
        return msgspec.structs.replace(report, grid=grid.name)
    if not report.by_hour:
        raise BadInput(f"{report.what} has no times, so that an intensity by the hour cannot be used; give --region or --grams")
    missing = [hour for hour in sorted(report.by_hour) if grid.at(hour * HOUR) is None]
    if missing:
        first = datetime.fromtimestamp(missing[0] * HOUR, UTC).strftime("%Y-%m-%d %H:00 UTC")
        raise BadInput(
            f"{grid.name} has no intensity for {len(missing)} of the run's {len(report.by_hour)} hours, the first at {first}"
        )
    weighted = sum(joules * (grid.at(hour * HOUR) or 0.0) for hour, joules in report.by_hour.items())
    counted = sum(report.by_hour.values())
    kwh, grams = report.joules / JOULES_PER_KWH * pue, weighted / counted if counted else 0.0
    number = len(report.by_hour)
    spread = f"by the hour ({number} hour{'' if number == 1 else 's'}), location-based"
    return msgspec.structs.replace(
        report, kwh=kwh, co2_grams=1000 * co2_kg(kwh, grams), grid=grid.name, grams_per_kwh=round(grams, 3), intensity=spread
    )


def with_carbon(report: EnergyReport, grid: Grid, pue: float) -> EnergyReport:
    import msgspec

    if report.joules is None:
        return msgspec.structs.replace(report, grid=grid.name, grams_per_kwh=grid.grams_per_kwh)
    kwh = report.joules / JOULES_PER_KWH * pue
    named = f"{grid.name}{f' {grid.year}' if grid.year else ''} ({grid.source})"
    return msgspec.structs.replace(
        report, kwh=kwh, co2_grams=1000 * co2_kg(kwh, grid.grams_per_kwh), grid=named, grams_per_kwh=grid.grams_per_kwh
    )
