"""`windlass plan MODEL`: from the command line's words to a Question, and its answer out."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from windlass.cli.open.resolve import resolve_hardware, resolve_model
from windlass.cli.plan.output import Output
from windlass.core.hardware.spec import Hardware
from windlass.core.plan import Plan
from windlass.errors import BadInput
from windlass.plan.cloud.inference import cloud_offers
from windlass.plan.inference.assemble import make_plan
from windlass.plan.inference.search import PlanRequest
from windlass.units import parse_context

DEFAULT_CONTEXT = 8192


def run(
    target: str,
    *,
    on: str | None,
    engine: str,
    goal: str,
    context: str | None,
    concurrency: int | None,
    quant: str,
    group: int,
    kv: str,
    pins: dict[str, int],
    lengths: tuple[str | None, str | None],
    cloud: bool,
    all_offers: bool,
    region: str,
    output: Output,
) -> int:
    resolved = resolve_model(target)
    prompt, new = (parse_context(text) if text is not None else None for text in lengths)
    asked = PlanRequest(
        spec=resolved.spec,
        rules=resolved.rules,
        hardware=_hardware(on, cloud),
        context_tokens=parse_context(context) if context is not None else min(DEFAULT_CONTEXT, resolved.spec.context_tokens),
        concurrency=concurrency,
        goal=goal,
        engine=engine,
        quant=quant,
        group=group,
        kv=kv,
        pins=pins,
        prompt_tokens=prompt,
        new_tokens=new,
        region=region,
    )
    if cloud and on is None:
        asked = _on_the_cheapest(asked, all_offers)
    made = make_plan(asked, source=resolved.source, digest=resolved.digest)
    if cloud or not made.fits:
        made = _with_offers(made, asked, cloud, all_offers)
    return output.write(made)


def _hardware(on: str | None, cloud: bool) -> Hardware:
    """With --cloud and no --on the offers are the hardware, and the cheapest of them is planned in full."""
    return resolve_hardware(on) if on is not None or not cloud else resolve_hardware("1xH200")


def _on_the_cheapest(asked: PlanRequest, all_offers: bool) -> PlanRequest:
    found = cloud_offers(asked, all_offers=all_offers)
    if not found:
        raise BadInput(f"no offer of the price book runs {asked.spec.name} whole; plan it on --on HARDWARE of several machines")
    return replace(asked, hardware=resolve_hardware(f"1x({found[0].num_devices}x{found[0].device})"))


def _with_offers(made: Plan, asked: PlanRequest, cloud: bool, all_offers: bool) -> Plan:
    found = cloud_offers(asked, all_offers=all_offers)
    would_fit = made.would_fit
    if found and not made.fits:
        cheapest = min(found, key=lambda offer: offer.usd_per_hour)
        kind = " spot" if cheapest.spot else ""
        where = f"{cheapest.provider}{kind} {cheapest.num_devices}x{cheapest.device} at ${cheapest.usd_per_hour:.2f}/h ({cheapest.priced_at})"
        would_fit = (*would_fit, where)
    return msgspec.structs.replace(made, cloud=found if cloud else (), would_fit=would_fit)
