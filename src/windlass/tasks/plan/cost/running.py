"""Running cost and carbon of a plan: device-hours at the price book's price, watts at the grid's carbon intensity."""

from __future__ import annotations

from collections.abc import Sequence

from windlass.core.hardware.energy import DEFAULT_PUE, co2_kg, energy_kwh, grid
from windlass.core.hardware.spec import Device
from windlass.core.plan import Cost, Energy
from windlass.tasks.plan.cost.prices import device_price_per_hour


def per_million(per_hour: float, tokens_per_second: float) -> float:
    return per_hour / (tokens_per_second * 3600) * 1e6 if tokens_per_second else 0.0


def cost_of(devices: Sequence[Device], tokens_per_second: float) -> Cost:
    """Cost of renting exactly these devices on demand. Devices without an hourly price (a CPU at home) are left out, and `priced_at` says so."""
    total, dates, unpriced = 0.0, set[str](), set[str]()
    for device, count in _counted(devices):
        found = device_price_per_hour(device.name)
        if found is None:
            unpriced.add(device.name)
            continue
        usd, offer = found
        total += usd * count
        dates.add(f"{offer.provider} {offer.date}{' (stale)' if offer.stale else ''}")
    priced_at = ", ".join(sorted(dates)) or "no price known"
    if unpriced and dates:
        priced_at += f"; no price for {', '.join(sorted(unpriced))}"
    return Cost(
        usd_per_hour=round(total, 4),
        usd_per_million_output_tokens=round(per_million(total, tokens_per_second), 4),
        priced_at=priced_at,
    )


def energy_of(devices: Sequence[Device], tokens_per_second: float, region: str) -> Energy:
    """At the devices' rated power, which measured decode comes close to."""
    watts = sum(device.watts * count for device, count in _counted(devices))
    found = grid(region)
    kwh = energy_kwh(1.0, watts, DEFAULT_PUE)
    return Energy(
        watts=round(watts, 1),
        kg_co2_per_million_output_tokens=round(per_million(co2_kg(kwh, found.grams_per_kwh), tokens_per_second), 4),
        grid=f"{found.name}, {found.grams_per_kwh:g} g/kWh, PUE {DEFAULT_PUE:g}",
    )


def _counted(devices: Sequence[Device]) -> list[tuple[Device, int]]:
    """(device, count), by identity: thousands of equal devices are a few objects repeated."""
    counts: dict[int, tuple[Device, int]] = {}
    for device in devices:
        found = counts.get(id(device))
        counts[id(device)] = (device, found[1] + 1 if found else 1)
    return list(counts.values())
