"""Cloud offers that can run a model, cheapest first, with storage cost, download and conversion time, and break-even against buying."""

from __future__ import annotations

from dataclasses import replace

from windlass.core.hardware.defaults import DISK_BYTES, node_ram_bytes
from windlass.core.hardware.devices import device, nic_bandwidth
from windlass.core.hardware.spec import Hardware, Node
from windlass.core.plan import CloudOffer
from windlass.errors import UnknownName
from windlass.tasks.plan.cost.prices import DOWNLOAD_BYTES_PER_SECOND, Offer, offers, purchase_price, storage_prices
from windlass.tasks.plan.cost.running import per_million
from windlass.tasks.plan.inference.assemble import checkpoint_bytes, native_scheme, published_bytes
from windlass.tasks.plan.inference.candidates import Candidate
from windlass.tasks.plan.inference.remedy import fits_devices
from windlass.tasks.plan.inference.search.request import PlanRequest

BY_THE_DEVICE = ("RunPod", "Nebius", "Vast")
"""Providers whose prices are per GPU and who rent up to eight in one machine."""
COUNTS = (1, 2, 4, 8)
CONVERT_BYTES_PER_SECOND = 0.5e9
"""Reading, quantizing and writing on a rented machine's cores (an assumption, not measured)."""


def cloud_offers(request: PlanRequest, *, all_offers: bool = False) -> tuple[CloudOffer, ...]:
    """`all_offers`: also stale and unverified ones. Pins and the request's hardware are ignored: the offer is the hardware."""
    unpinned = replace(request, pins={}, engine="auto")
    planned: dict[tuple[str, int], Candidate | None] = {}
    found: list[CloudOffer] = []
    for offer in offers():
        if (offer.stale or not offer.verified) and not all_offers:
            continue
        for count in COUNTS if offer.provider in BY_THE_DEVICE else (1,):
            key = (offer.device, offer.num_devices * count)
            if key not in planned:
                planned[key] = _plan_on(unpinned, offer, count)
            candidate = planned[key]
            if candidate is not None:
                found.append(_offer(request, offer, count, candidate))
    by_token = request.goal in ("throughput", "cost")
    return tuple(sorted(found, key=lambda one: one.usd_per_million_output_tokens if by_token else one.usd_per_hour))


def _plan_on(request: PlanRequest, offer: Offer, count: int) -> Candidate | None:
    try:
        one = device(offer.device)
    except UnknownName:
        return None
    devices = (one,) * (offer.num_devices * count)
    node = Node(
        devices=devices, ram_bytes=(offer.ram_bytes or node_ram_bytes(devices)), disk_bytes=offer.disk_bytes or DISK_BYTES
    )
    hardware = Hardware(nodes=(node,), network_bandwidth=nic_bandwidth(one.name), description=f"{len(devices)}x{one.name}")
    return fits_devices(replace(request, hardware=hardware))


def _offer(request: PlanRequest, offer: Offer, count: int, candidate: Candidate) -> CloudOffer:
    fetched = published_bytes(request)
    same = candidate.scheme.name == native_scheme(request.spec)
    stored = 0 if same else checkpoint_bytes(request.rules, candidate.scheme, published=False)
    usd_per_hour = offer.usd_per_hour * count
    num_devices = offer.num_devices * count
    card = purchase_price(offer.device)
    speed = candidate.speed
    storage = min(storage_prices(), key=lambda one: (not one.name.startswith(offer.provider), one.usd_per_gb_month))
    return CloudOffer(
        provider=offer.provider,
        instance=offer.instance if count == 1 else f"{count}x {offer.instance}",
        device=offer.device,
        num_devices=num_devices,
        num_instances=1,
        spot=offer.spot,
        usd_per_hour=round(usd_per_hour, 3),
        priced_at=offer.date,
        stale=offer.stale,
        verified=offer.verified,
        source=offer.source,
        layout=str(candidate.layout),
        scheme=candidate.scheme.name,
        decode_tokens_per_second=speed.decode_tokens_per_second,
        usd_per_million_output_tokens=round(per_million(usd_per_hour, speed.sustained_tokens_per_second), 4),
        storage_usd_per_month=round(storage.usd_per_gb_month * (fetched + stored) / 1e9, 2),
        download_hours=round(fetched / DOWNLOAD_BYTES_PER_SECOND / 3600, 3),
        convert_hours=0.0 if same else round(fetched / CONVERT_BYTES_PER_SECOND / 3600, 3),
        break_even_hours=round(card.usd * num_devices / usd_per_hour, 1) if card else None,
    )
