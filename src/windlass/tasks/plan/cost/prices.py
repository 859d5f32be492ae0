"""The price book: dated offers with their source. Never downloads prices.

The figures are in `prices.toml`. An offer older than a year against the newest date in the book is stale: it is shown but not chosen.
"""

from __future__ import annotations

import tomllib
from datetime import date, timedelta
from functools import cache
from pathlib import Path

import msgspec

from windlass.core.hardware.devices import canonical_name
from windlass.core.model import Frozen
from windlass.errors import UnknownName
from windlass.units import GB, GIB

STALE_AFTER = timedelta(days=365)

DOWNLOAD_BYTES_PER_SECOND = 0.5 * GB
"""Assumed download speed of weights on a cloud machine: 4 Gb/s with parallel downloads."""


class Offer(Frozen):
    provider: str
    instance: str
    device: str
    """Name in the device catalog."""
    num_devices: int
    usd_per_hour: float
    """Price of the whole instance."""
    spot: bool
    verified: bool
    stale: bool
    date: str
    """ISO date when the price was listed."""
    source: str
    note: str
    ram_bytes: int | None
    disk_bytes: int | None

    @property
    def usd_per_device_hour(self) -> float:
        return self.usd_per_hour / self.num_devices


class Storage(Frozen):
    name: str
    usd_per_gb_month: float
    date: date
    source: str


class Purchase(Frozen):
    """A rough street price of one card, without the server."""

    device: str
    usd: float
    year: int
    source: str = "rough street price, from memory; UNVERIFIED"


def offers() -> tuple[Offer, ...]:
    return _offers()


def device_price_per_hour(device_name: str) -> tuple[float, Offer] | None:
    """Dollars per device-hour and the offer it comes from: the cheapest on-demand offer; a stale one only if there is nothing newer.

    None if the book has no such offer (an H800, a CPU).
    """
    name = _known_name(device_name)
    found = [offer for offer in _offers() if offer.device == name and offer.verified and not offer.spot]
    best = min(found, key=lambda offer: (offer.stale, offer.usd_per_device_hour), default=None)
    return None if best is None else (best.usd_per_device_hour, best)


def purchase_price(device_name: str) -> Purchase | None:
    name = _known_name(device_name)
    return next((each for each in _book().purchase if each.device == name), None)


def storage_prices() -> tuple[Storage, ...]:
    return _book().storage


def _known_name(device_name: str) -> str:
    """The catalog's spelling; an unknown name is kept, since it may come from a probe."""
    try:
        return canonical_name(device_name)
    except UnknownName:
        return device_name


# --- the file --------------------------------------------------------------------------------------------------------


class _OfferRow(Frozen):
    instance: str
    device: str
    num_devices: int
    usd_per_hour: float
    spot: bool = False
    ram_gib: float | None = None
    disk_gb: float | None = None
    note: str = ""


class _Provider(Frozen):
    name: str
    date: date
    source: str
    offers: tuple[_OfferRow, ...]
    verified: bool = True


class _Book(Frozen):
    compiled: date
    provider: tuple[_Provider, ...]
    storage: tuple[Storage, ...]
    purchase: tuple[Purchase, ...]


@cache
def _book() -> _Book:
    text = Path(__file__).with_name("prices.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), _Book)


@cache
def _offers() -> tuple[Offer, ...]:
    newest = max(_book().compiled, *(provider.date for provider in _book().provider))
    return tuple(_offer(provider, row, newest) for provider in _book().provider for row in provider.offers)


def _offer(provider: _Provider, row: _OfferRow, newest: date) -> Offer:
    return Offer(
        provider=provider.name,
        instance=row.instance,
        device=row.device,
        num_devices=row.num_devices,
        usd_per_hour=row.usd_per_hour,
        spot=row.spot,
        verified=provider.verified,
        stale=newest - provider.date > STALE_AFTER,
        date=provider.date.isoformat(),
        source=provider.source,
        note=row.note,
        ram_bytes=None if row.ram_gib is None else round(row.ram_gib * GIB),
        disk_bytes=None if row.disk_gb is None else round(row.disk_gb * GB),
    )
