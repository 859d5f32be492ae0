"""Energy and carbon of a run, with the formula of model cards.

kWh = hours x watts x PUE / 1000; kg = kWh x g/kWh / 1000 (Table 15 of LLaMA, arXiv 2302.13971, is reproduced by it).
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from windlass.core.model import Frozen
from windlass.errors import BadInput, UnknownName

DEFAULT_PUE = 1.1
"""Power usage effectiveness: power of the data centre over power of its machines. 1.1 is LLaMA's (arXiv 2302.13971); the
world average is nearer 1.6 (Uptime Institute's yearly survey, from memory), and codecarbon's default is 1.0."""


class Grid(Frozen):
    name: str
    grams_per_kwh: float
    """CO2 equivalent, location-based."""
    year: int | None
    """None if the source gives no year."""
    source: str


def energy_kwh(hours: float, watts: float, pue: float = DEFAULT_PUE) -> float:
    """For many devices: device-hours x watts of one device."""
    if hours < 0 or watts < 0:
        raise BadInput(f"hours ({hours:g}) and watts ({watts:g}) cannot be negative")
    if pue < 1:
        raise BadInput(f"PUE {pue:g} is impossible: it must be at least 1.0")
    return hours * watts * pue / 1000


def co2_kg(kwh: float, grams_per_kwh: float) -> float:
    return kwh * grams_per_kwh / 1000


def grid(region: str = "world") -> Grid:
    """By country (`FRA`, `fr`, `France`), cloud region (`us-central1`, `eu-north-1`) or `world`."""
    key = _spellings().get(region.strip().lower())
    if key is None:
        raise UnknownName("region", region, regions())
    table = _tables()[key]
    grams = float(table["grams_per_kwh"])
    return Grid(name=table.get("name", key), grams_per_kwh=grams, year=table.get("year"), source=table["source"])


def regions() -> tuple[str, ...]:
    return tuple(_tables())


@cache
def _tables() -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("grid.toml").read_text(encoding="utf-8"))


@cache
def _spellings() -> dict[str, str]:
    names = {key: (key, table.get("name", key), *table.get("aliases", ())) for key, table in _tables().items()}
    return {name.lower(): key for key, spellings in names.items() for name in spellings}
