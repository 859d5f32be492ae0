"""Cost of a training run at each provider: planned again for the same number of each device on offer."""

from __future__ import annotations

from windlass.core.hardware.defaults import DISK_BYTES, node_ram_bytes
from windlass.core.hardware.devices import device, entry
from windlass.core.hardware.spec import Hardware, Node
from windlass.core.model import ModelSpec
from windlass.core.plan import CloudOffer, Reason
from windlass.core.recipe.recipe import Recipe
from windlass.core.rule import Rule
from windlass.errors import Impossible
from windlass.tasks.plan.cloud.inference import BY_THE_DEVICE
from windlass.tasks.plan.cost.prices import DOWNLOAD_BYTES_PER_SECOND, Offer, offers, purchase_price, storage_prices
from windlass.tasks.plan.training.memory.footprint import Footprints
from windlass.tasks.plan.training.plan import TrainingPlan, as_trained, plan_training
from windlass.tasks.plan.training.remedy import cluster
from windlass.tasks.plan.training.search import something_fits

COUNTS = tuple(2**power for power in range(3, 15))
USUAL_DEVICE = "H200"
KEPT_CHECKPOINTS = 3
"""Full checkpoints kept on storage at a time."""


def training_offers(
    spec: ModelSpec, rules: tuple[Rule, ...], recipe: Recipe, num_devices: int, *, all_offers: bool = False
) -> tuple[CloudOffer, ...]:
    """Cheapest run first. Spot prices assume the run is interrupted no more often than the plan's failures."""
    spec = as_trained(spec, recipe)
    footprints = Footprints(spec, rules)
    plans: dict[str, TrainingPlan | None] = {}
    found: list[CloudOffer] = []
    for offer in offers():
        if (offer.stale or not offer.verified) and not all_offers:
            continue
        if num_devices % offer.num_devices or (
            offer.num_devices == 1 and offer.provider not in BY_THE_DEVICE and num_devices > 1
        ):
            continue
        if offer.device not in plans:
            plans[offer.device] = _plan_on(footprints, recipe, offer.device, num_devices)
        plan = plans[offer.device]
        if plan is not None and plan.fits:
            found.append(_priced(offer, plan, num_devices))
    return tuple(sorted(found, key=lambda one: one.run_usd or 0.0))


def smallest_cluster(spec: ModelSpec, rules: tuple[Rule, ...], recipe: Recipe) -> tuple[Hardware, Reason]:
    """The smallest cluster that fits, where no hardware was named."""
    spec = as_trained(spec, recipe)
    for count in COUNTS:
        hardware = _cluster(USUAL_DEVICE, count)
        if hardware is not None and something_fits(spec, rules, hardware, recipe):
            why = f"the smallest of {COUNTS[0]}, {COUNTS[1]}, {COUNTS[2]}, ... {USUAL_DEVICE} that fits; use --on to plan a larger cluster"
            return hardware, Reason(choice="devices", value=str(count), why=why)
    raise Impossible(
        f"the run does not fit on up to {COUNTS[-1]:,} {USUAL_DEVICE}; relax the recipe's pinned values, or name hardware with --on"
    )


def _cluster(name: str, num_devices: int) -> Hardware | None:
    per_node = min(entry(name).per_node, 8, num_devices)
    if num_devices % per_node:
        return None
    devices = (device(name),) * per_node
    node = Node(devices=devices, ram_bytes=node_ram_bytes(devices), disk_bytes=DISK_BYTES)
    return cluster(node, num_devices // per_node)


def _plan_on(footprints: Footprints, recipe: Recipe, name: str, num_devices: int) -> TrainingPlan | None:
    """A coarse search: prices are not exact to the percent either."""
    hardware, spec, rules = _cluster(name, num_devices), footprints.spec, footprints.rules
    if hardware is None or not something_fits(spec, rules, hardware, recipe, footprints):
        return None
    return plan_training(spec, rules, hardware, recipe, breadth="coarse", footprints=footprints)


def _priced(offer: Offer, plan: TrainingPlan, num_devices: int) -> CloudOffer:
    usd_per_hour = offer.usd_per_device_hour * num_devices
    card = purchase_price(offer.device)
    storage = min(storage_prices(), key=lambda one: (not one.name.startswith(offer.provider), one.usd_per_gb_month))
    return CloudOffer(
        provider=offer.provider,
        instance=offer.instance,
        device=offer.device,
        num_devices=num_devices,
        num_instances=num_devices // offer.num_devices,
        spot=offer.spot,
        usd_per_hour=round(usd_per_hour, 2),
        priced_at=offer.date,
        stale=offer.stale,
        verified=offer.verified,
        source=offer.source,
        layout=f"tp={plan.layout.tp} pp={plan.layout.pp} ep={plan.layout.ep} dp={plan.layout.dp}",
        scheme=plan.job.compute,
        decode_tokens_per_second=0.0,
        usd_per_million_output_tokens=0.0,
        storage_usd_per_month=round(storage.usd_per_gb_month * KEPT_CHECKPOINTS * plan.checkpoint.bytes / 1e9, 2),
        download_hours=round(plan.checkpoint.bytes / DOWNLOAD_BYTES_PER_SECOND / 3600, 3),
        convert_hours=0.0,
        break_even_hours=round(card.usd * num_devices / usd_per_hour, 1) if card else None,
        run_days=round(plan.run.days_with_failures, 2),
        run_usd=round(offer.usd_per_device_hour * plan.run.device_hours, 2),
    )
