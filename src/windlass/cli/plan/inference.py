"""`windlass plan MODEL`: builds the PlanRequest from command-line options, plans, and writes the plan."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path

import msgspec

from windlass.cli.console import working
from windlass.cli.plan.output import PlanOutput
from windlass.core.hardware.caps import capped
from windlass.core.hardware.measured import MeasuredRun
from windlass.core.hardware.spec import Hardware
from windlass.core.plan import CloudOffer, Plan
from windlass.core.scheme import Scheme, scheme
from windlass.errors import BadInput
from windlass.open.hardware import resolve_hardware, with_disk
from windlass.open.resolve import ModelDescription, describe_model, files_for
from windlass.tasks.plan.cloud.inference import cloud_offers
from windlass.tasks.plan.inference.assemble import make_plan
from windlass.tasks.plan.inference.measured import with_limits
from windlass.tasks.plan.inference.search.request import LoadRequest, PlanRequest
from windlass.units import parse_bytes, parse_context

DEFAULT_CONTEXT = 8192


class InferenceArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `windlass plan MODEL`."""

    on: str | None
    engine: str
    goal: str
    context: str | None
    concurrency: int | None
    quant: str
    group: int
    kv: str
    pins: dict[str, int]
    prompt_tokens: str | None
    new_tokens: str | None
    cloud: bool
    all_offers: bool
    region: str
    gpu_memory: str | None = None
    host_memory: str | None = None
    disk_folder: Path | None = None
    requests: int = 0
    spread: bool = False
    rate: str | None = None
    ttft: str | None = None
    tpot: str | None = None
    drafts: int = 0
    acceptance: float = 0.7
    cached_prefix: float = 0.0
    prefill_on: str | None = None
    explain: bool = False


def run(target: str, arguments: InferenceArguments, output: PlanOutput) -> int:
    resolved = describe_model(target)
    request = _as_run(_request(resolved, arguments), target, arguments)
    offers = _offers(request, arguments) if arguments.cloud else None
    if offers is not None and arguments.on is None:
        request = _on_cheapest_offer(request, offers)
    plan = make_plan(request, source=resolved.source, digest=resolved.digest)
    if arguments.prefill_on is not None:
        from windlass.tasks.plan.inference.disaggregate import disaggregate

        plan = msgspec.structs.replace(plan, disaggregated=disaggregate(request, resolve_hardware(arguments.prefill_on)))
    if offers is not None or not plan.fits:
        plan = _with_offers(plan, _offers(request, arguments) if offers is None else offers, arguments.cloud)
    return output.write(plan)


def _offers(request: PlanRequest, arguments: InferenceArguments) -> tuple[CloudOffer, ...]:
    """The price book has dozens of machines, and each is planned: seconds on a busy one."""
    with working("planning every machine of the price book"):
        return cloud_offers(request, all_offers=arguments.all_offers)


def _request(resolved: ModelDescription, arguments: InferenceArguments) -> PlanRequest:
    context, prompt, new = (
        parse_context(text) if text is not None else None
        for text in (arguments.context, arguments.prompt_tokens, arguments.new_tokens)
    )
    hardware, runs = _measured(_hardware(arguments.on, arguments.cloud), here=arguments.on is None and not arguments.cloud)
    hardware = _with_caps(hardware, arguments)
    return PlanRequest(
        spec=resolved.spec,
        rules=resolved.rules,
        hardware=hardware,
        context_tokens=context if context is not None else min(DEFAULT_CONTEXT, resolved.spec.context_tokens),
        concurrency=arguments.concurrency,
        goal="throughput" if arguments.rate is not None and arguments.concurrency is None else arguments.goal,
        engine=arguments.engine,
        quant=arguments.quant,
        group=arguments.group,
        kv=arguments.kv,
        pins=arguments.pins,
        prompt_tokens=prompt,
        new_tokens=new,
        region=arguments.region,
        stored=_stored(resolved, hardware),
        requests=arguments.requests,
        spread=arguments.spread,
        draft_tokens=arguments.drafts,
        acceptance=arguments.acceptance if arguments.drafts else 0.0,
        cached_prefix=arguments.cached_prefix,
        explain=arguments.explain,
        load=_load(arguments),
        measured=runs,
    )


def _measured(hardware: Hardware, *, here: bool) -> tuple[Hardware, tuple[MeasuredRun, ...]]:
    """This machine with the figures measured on it, and the benchmark runs kept of it."""
    if not here:
        return hardware, ()
    from windlass.tasks.bench import kept

    if not kept.wanted() or not kept.path().is_file():
        return hardware, ()
    found, name = kept.load(), kept.this_machine()
    limits = found.limits.get(name)
    return with_limits(hardware, limits) if limits is not None else hardware, kept.runs_of(found, name)


def _load(arguments: InferenceArguments) -> LoadRequest | None:
    if arguments.rate is None:
        if arguments.ttft or arguments.tpot:
            raise BadInput("--ttft and --tpot are limits of a load; add --rate 5/s")
        return None
    text = arguments.rate.strip().removesuffix("/s")
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < 1e6:
        raise BadInput(f"--rate {arguments.rate}: write requests per second, like 5/s")
    return LoadRequest(rate=rate, first_seconds=_seconds(arguments.ttft), between_seconds=_seconds(arguments.tpot))


def _seconds(text: str | None) -> float:
    """`50ms`, `1.5s`; without a limit, endless."""
    if text is None:
        return inf
    units = {"ms": 1e-3, "us": 1e-6, "s": 1.0}
    unit = next((unit for unit in units if text.strip().endswith(unit)), None)
    try:
        found = float(text.strip().removesuffix(unit or "")) * units[unit or "s"]
    except ValueError:
        found = 0.0
    if not found > 0:
        raise BadInput(f"{text!r} is not a time; write it like 50ms or 1s")
    return found


def _stored(resolved: ModelDescription, hardware: Hardware) -> Scheme | None:
    """How the files on this disk are held by those devices; None: as plain numbers."""
    files = resolved.files
    if files is None or files.scheme is None:
        return None
    on_cpus = all(device.kind == "cpu" for device in hardware.distinct_devices)
    return files.scheme if on_cpus or not files.only_on_cpus else scheme("bf16")


def _as_run(request: PlanRequest, target: str, arguments: InferenceArguments) -> PlanRequest:
    """With the published files that `windlass run` takes on this hardware, unless the user says otherwise."""
    is_own = request.engine in ("auto", "windlass") and request.quant == "auto" and request.stored is None
    if not is_own or arguments.cloud:
        return request
    chosen = files_for(target, request.hardware)
    if chosen is None or chosen.scheme is None:
        return request
    where = f"{chosen.hub}/{chosen.file}" if chosen.file else chosen.hub
    return replace(
        request, stored=chosen.scheme, stored_why=f"{where}, which `windlass run` and `serve` take here; --quant plans another"
    )


def _hardware(on: str | None, cloud: bool) -> Hardware:
    """With --cloud and without --on, the cheapest offer replaces this placeholder."""
    return resolve_hardware(on) if on is not None or not cloud else resolve_hardware("1xH200")


def _with_caps(hardware: Hardware, arguments: InferenceArguments) -> Hardware:
    """Less memory where it was capped; the disk of the folder, measured, if this is the machine that is planned for."""
    sizes = [parse_bytes(size) for size in (arguments.gpu_memory or "").split(",") if size]
    host = None if arguments.host_memory is None else parse_bytes(arguments.host_memory)
    found = capped(hardware, sizes, host)
    if arguments.disk_folder is None:
        return found
    if arguments.on is not None:
        raise BadInput("--disk-folder is a folder of this machine; with --on, write disk=500GB into the hardware")
    return with_disk(found, arguments.disk_folder)


def _on_cheapest_offer(request: PlanRequest, found: tuple[CloudOffer, ...]) -> PlanRequest:
    if not found:
        raise BadInput(f"no single machine in the price book runs {request.spec.name}; plan several machines with --on HARDWARE")
    return replace(request, hardware=resolve_hardware(f"1x({found[0].num_devices}x{found[0].device})"))


def _with_offers(plan: Plan, found: tuple[CloudOffer, ...], shown: bool) -> Plan:
    would_fit = plan.would_fit
    if found and not plan.fits:
        cheapest = min(found, key=lambda offer: offer.usd_per_hour)
        kind = " spot" if cheapest.spot else ""
        where = f"{cheapest.provider}{kind} {cheapest.num_devices}x{cheapest.device} at ${cheapest.usd_per_hour:.2f}/h ({cheapest.priced_at})"
        would_fit = (*would_fit, where)
    return msgspec.structs.replace(plan, cloud=found if shown else (), would_fit=would_fit)
