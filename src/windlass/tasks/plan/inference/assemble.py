"""From a request to a complete Plan: runs the search, then adds cost, reasons and placement."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from windlass.core.count import count_parameters
from windlass.core.layout import Layout, coordinates
from windlass.core.model import ModelSpec, kv_bytes_per_token
from windlass.core.place import Placement
from windlass.core.plan import Checkpoint, KvBlocks, LoadPlan, MemoryPlan, ModelFacts, Plan, Rank, StepPart
from windlass.core.rule import ModelPart, Rule
from windlass.core.scheme import Scheme, scheme
from windlass.core.tiers.values import TierPlacement
from windlass.tasks.plan.cost.running import cost_of, energy_of
from windlass.tasks.plan.engines.tried import not_run_yet
from windlass.tasks.plan.inference.candidates import Candidate, most_sequences
from windlass.tasks.plan.inference.compare import engine_rows
from windlass.tasks.plan.inference.measured import corrected
from windlass.tasks.plan.inference.reasons import alternative, reasons_for
from windlass.tasks.plan.inference.remedy import remedies
from windlass.tasks.plan.inference.search.best import search
from windlass.tasks.plan.inference.search.choices import runs_on
from windlass.tasks.plan.inference.search.request import PlanRequest
from windlass.tasks.plan.inference.sites import Site, split_cpus, whole_site
from windlass.tasks.plan.inference.tiers import tier_reasons, with_tiers
from windlass.tasks.plan.memory import round_up
from windlass.tasks.plan.shards import shards_of


def make_plan(request: PlanRequest, *, source: str = "", digest: str = "") -> Plan:
    request = replace(request, hardware=split_cpus(request.hardware, request.pins))
    found = search(request)
    best, tiers = with_tiers(found.best, found.site, request.rules)
    found = replace(found, best=best)
    sizes = shards_of(request.spec, request.rules)
    placement: Placement = msgspec.structs.replace(
        sizes.placement(best.layout, best.scheme, best.fit.shares), stages=best.fit.stages
    )
    used = found.site.devices[: best.layout.world]
    runs = runs_on(best.engine, replace(request, hardware=found.site.hardware))
    speed, measured = corrected(best, found.site, request.measured) if runs and best.fits else (None, [])
    rate = speed.sustained_tokens_per_second if speed else 0.0
    offloaded = bool(best.fit.host_bytes or best.fit.disk_bytes)
    return Plan(
        model=model_facts(request.spec, request.rules),
        fits=best.fits,
        engine=best.engine.name if runs else "none",
        layout=best.layout,
        scheme=best.scheme,
        memory=_memory(best, tiers),
        speed=speed,
        cost=cost_of(used, rate),
        energy=energy_of(used, rate, request.region),
        reasons=(
            *reasons_for(request, found, placement),
            *(engine_rows(request, found) if runs else ()),
            *measured,
            *tier_reasons(tiers, has_experts=best.spec.experts is not None),
        ),
        alternatives=tuple(alternative(request, best, other) for other in found.others),
        workload=best.workload,
        hardware=request.hardware.description,
        placement=placement,
        shares=best.fit.shares,
        kv_blocks=_kv_blocks(best),
        checkpoint=_checkpoint(request, best.scheme, source, digest),
        ranks=_ranks(found.site, best.layout),
        short_bytes=best.fit.short_bytes,
        would_fit=remedies(request) if offloaded or not best.fits else (),
        step=_step(request, best) if speed is not None else (),
        load=_load(request, best) if speed is not None else None,
        caution=_caution(best),
        spec=request.spec,
        tiers=tiers,
    )


def _step(request: PlanRequest, best: Candidate) -> tuple[StepPart, ...]:
    if not request.explain:
        return ()
    from windlass.tasks.plan.speed.explain import step_parts

    return step_parts(best.times, best.times.model.sequences(best.layout), best.workload.mean_decode_context)


def _load(request: PlanRequest, best: Candidate) -> LoadPlan | None:
    """As many at once as memory holds at their mean length, whatever concurrency the plan reserves for."""
    asked = request.load
    if asked is None:
        return None
    from windlass.tasks.plan.speed.load import served_load

    site = whole_site(best.times.hardware)
    work = msgspec.structs.replace(best.workload, concurrency=best.layout.dp, waiting=0)
    room = most_sequences(best.times.model.sizes, site, best.engine, best.scheme, best.layout, work)
    most = (room.workload.concurrency if room is not None else best.workload.concurrency) // best.layout.dp
    return served_load(best.times, max(most, 1), asked.rate, asked.first_seconds, asked.between_seconds)


def _caution(best: Candidate) -> str:
    if best.engine.name != "windlass":
        return ""
    return not_run_yet(
        [slot.device for slot in best.fit.slots],
        best.layout.world,
        offloads=bool(best.fit.host_bytes),
        to_disk=bool(best.fit.disk_bytes),
        has_kernels=best.times.offloads,
    )


def model_facts(spec: ModelSpec, rules: tuple[Rule, ...]) -> ModelFacts:
    counted = count_parameters(spec, rules)
    return ModelFacts(
        name=spec.name,
        family=spec.family,
        parameters=counted.total,
        active_parameters=counted.active,
        checkpoint_parameters=counted.checkpoint,
        kv_bytes_per_token=kv_bytes_per_token(spec),
    )


def _memory(best: Candidate, tiers: tuple[TierPlacement, ...]) -> MemoryPlan:
    """Replicas are identical, so the first one's devices are repeated."""
    replicas = best.layout.dp
    return MemoryPlan(
        per_device=best.fit.memory * replicas,
        host_bytes=(sum(one.host_bytes for one in tiers if one.device_bytes) if tiers else best.fit.host_bytes) * replicas,
        disk_bytes=(sum(one.disk_bytes for one in tiers) if tiers else best.fit.disk_bytes) * replicas,
    )


def _ranks(site: Site, layout: Layout) -> tuple[Rank, ...]:
    """The device of each rank, in the user's numbering of nodes and devices."""
    made: list[Rank] = []
    for rank in range(layout.world):
        (node, device), at = site.places[rank], coordinates(layout, rank)
        made.append(Rank(rank=rank, node=node, device=device, tp=at.tp, pp=at.pp, dp=at.dp))
    return tuple(made)


def _kv_blocks(best: Candidate) -> KvBlocks:
    """KV blocks that the workload needs per replica, and how many fit on the fullest device."""
    block = best.engine.block_tokens
    sequences = -(-best.workload.concurrency // best.layout.dp)
    needed = sequences * round_up(best.workload.reserve_tokens, block) // block
    rooms = [
        int((held.capacity_bytes - held.total_bytes + held.kv_bytes) / held.kv_bytes * needed)
        for held in best.fit.memory
        if held.kv_bytes
    ]
    return KvBlocks(block_tokens=block, needed=needed, available=max(min(rooms, default=needed), 0))


def checkpoint_bytes(rules: tuple[Rule, ...], how: Scheme, *, published: bool) -> int:
    """Size of all tensors in a scheme. Published files also hold the MTP layer and duplicated tensors."""
    total = 0
    for rule in rules:
        if not published and (rule.part is not ModelPart.MAIN or rule.copy_of is not None):
            continue
        stored = how.stored(rule.keep, rule.shape[-1], is_head=rule.role.value == "head")
        one = stored.matrix_bytes(*rule.shape) if len(rule.shape) == 2 else rule.shape[0] * stored.bits // 8
        total += one * rule.copies
    return total


def native_scheme(spec: ModelSpec) -> str:
    """The scheme of the published files, if it is one of ours; else bf16."""
    return spec.native_scheme if spec.native_scheme in ("fp8", "mxfp4") else "bf16"


def published_bytes(request: PlanRequest) -> int:
    return checkpoint_bytes(request.rules, scheme(native_scheme(request.spec)), published=True)


def _checkpoint(request: PlanRequest, how: Scheme, source: str, digest: str) -> Checkpoint:
    return Checkpoint(
        source=source or request.spec.name,
        digest=digest,
        bytes_as_published=published_bytes(request),
        bytes_converted=checkpoint_bytes(request.rules, how, published=False),
    )
