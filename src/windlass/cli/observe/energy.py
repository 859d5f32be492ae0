"""`windlass observe energy`: a run's energy and carbon as a table or as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from windlass.cli.observe.node import chosen_grid, hourly_grid
from windlass.core.model import Frozen
from windlass.errors import BadInput
from windlass.units import format_seconds

if TYPE_CHECKING:
    from windlass.tasks.observe.energy.report import EnergyReport


class EnergyOptions(Frozen):
    region: str = "world"
    grams: float | None = None
    intensity: Path | None = None
    watts: float | None = None
    pue: float = 1.0
    as_json: bool = False


def show_energy(run: Path, options: EnergyOptions) -> int:
    from windlass.tasks.observe.energy.reading import report_of
    from windlass.tasks.observe.energy.report import with_carbon, with_hourly_carbon

    if options.pue < 1:
        raise BadInput(f"--pue is {options.pue:g}; it must be at least 1")
    found = report_of(run, options.watts)
    if options.intensity is not None:
        report = with_hourly_carbon(found, hourly_grid(options.intensity, options.grams), options.pue)
    else:
        grid = chosen_grid(options.region, options.grams)
        assert grid is not None
        report = with_carbon(found, grid, options.pue)
    if options.as_json:
        extra = {"watts": report.watts, "joules_per_token": report.joules_per_token}
        print(msgspec.json.encode({**msgspec.to_builtins(report), **extra}).decode())
    else:
        _print(report)
    return 0


def _print(report: EnergyReport) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for what, value in rows(report):
        table.add_row(what, value)
    Console(highlight=False).print(table)


def rows(report: EnergyReport) -> list[tuple[str, str]]:
    found = [("run", report.what), ("method", f"{report.method}: {report.source}"), ("time", format_seconds(report.seconds))]
    if report.joules is None:
        return found
    spread = f" +/- {report.uncertainty:.0%}" if report.uncertainty else ""
    found.append(("energy", f"{report.joules:,.0f} J{spread} ({report.kwh or 0:,.4f} kWh with the data centre's overhead)"))
    found += [
        (f"  {use}", f"{joules:,.0f} J ({joules / report.joules:.1%})") for use, joules in report.by_use.items() if report.joules
    ]
    if report.watts is not None:
        found.append(("power", f"{report.watts:,.1f} W on average"))
    if report.joules_per_token is not None:
        found.append(("per token", f"{report.joules_per_token:,.4g} J{spread}"))
    if report.co2_grams is not None:
        found.append(("CO2e", f"{report.co2_grams:,.3g} g at {report.grams_per_kwh:g} g/kWh: {report.intensity}, {report.grid}"))
    return found
