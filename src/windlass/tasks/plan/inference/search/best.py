"""The search over engines, schemes, layouts and memory tiers. Pure.

Order of preference: the least lossy scheme whose weights and KV cache fit on the devices; within it, the best layout for the goal.
Weights are offloaded to host memory and disk only if no scheme fits, and then in the smallest scheme.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import msgspec

from windlass.core import fused
from windlass.core.hardware.spec import Hardware
from windlass.core.layout import Layout
from windlass.core.rule import Rule
from windlass.core.scheme import Scheme
from windlass.errors import Impossible
from windlass.tasks.plan.cost.running import cost_of
from windlass.tasks.plan.engines.classes import device_class
from windlass.tasks.plan.engines.load import loads_scheme
from windlass.tasks.plan.engines.profile import EngineProfile
from windlass.tasks.plan.inference.advice import BATCH_FOR_SERVER
from windlass.tasks.plan.inference.candidates import Candidate, evaluate, most_sequences, queued
from windlass.tasks.plan.inference.feasible import check_layout, layouts, working_layouts
from windlass.tasks.plan.inference.search.choices import engines, preferred, schemes
from windlass.tasks.plan.inference.search.request import LoadRequest, PlanRequest, check, request_workload
from windlass.tasks.plan.inference.sites import Site, raised_limit, sites
from windlass.tasks.plan.shards import ModelShards, shards_of
from windlass.tasks.plan.speed.load import ServedLoad

LARGE = 64
"""Above this many devices, only the three shortest pipelines that fit are tried per (tp, ep): longer ones only add latency."""


@dataclass(frozen=True)
class SearchResult:
    """The chosen candidate, the runners-up, and their devices."""

    best: Candidate
    others: tuple[Candidate, ...]
    site: Site


def search(request: PlanRequest) -> SearchResult:
    """The best candidate without offloading; else the best with offloading; else the one that is least short of memory."""
    refused: list[str] = []
    tiers = _site_searches(request, refused)
    found = _on_devices(request, tiers) or _on_devices(request, _queueing(request, refused))
    if found is not None:
        return found
    raised = raised_limit(request.hardware)
    if raised is not None and (found := _on_devices(request, _site_searches(replace(request, hardware=raised), refused))):
        return found
    spilled = [one for tier in tiers for search in tier if (one := search.spilled()) is not None]
    if not spilled:
        if request.engine == "auto" and not request.last_resort and "windlass" in request.spec.engines:
            return search(replace(request, last_resort=True))
        raise Impossible(_no_layout(request, refused))
    return min(spilled, key=lambda one: (one.best.fit.short_bytes, *rank(request, one.best)))


def _queueing(request: PlanRequest, refused: list[str]) -> list[list[_SiteSearch]]:
    """Where the requested sequences do not fit at full length all at once: some wait. Only if that was asked for."""
    if request.concurrency is None or request.concurrency == 1 or not request.waits:
        return []
    return _site_searches(replace(request, queue=True), refused)


def search_devices(request: PlanRequest) -> SearchResult | None:
    """The best candidate without offloading; None if there is none. Asked many times, so what cannot hold the weights is not searched, and only the
    engine that comes first is asked."""
    request = replace(request, first_engine=True)
    if _device_bytes(request.hardware) < least_bytes(request.rules):
        return None
    return _on_devices(request, _site_searches(request, []))


def least_bytes(rules: tuple[Rule, ...]) -> int:
    """Half a byte per parameter: no scheme is smaller."""
    return sum(rule.elements * rule.copies for rule in rules if rule.copy_of is None and rule.part.value == "main") // 2


def _device_bytes(hardware: Hardware) -> int:
    return sum(
        max(device.memory_bytes, node.ram_bytes if device.kind == "cpu" else 0)
        for node in hardware.nodes
        for device in node.devices
    )


def _site_searches(request: PlanRequest, refused: list[str]) -> list[list[_SiteSearch]]:
    check(request)
    sizes = shards_of(request.spec, request.rules)
    return [[_SiteSearch(request, site, sizes, refused) for site in tier] for tier in sites(request.hardware)]


def _on_devices(request: PlanRequest, tiers: list[list[_SiteSearch]]) -> SearchResult | None:
    for tier in tiers:
        found = [one for search in tier if (one := search.on_devices()) is not None]
        if found:
            return min(found, key=lambda one: _preference(request, one))
    return None


def _preference(request: PlanRequest, found: SearchResult) -> tuple[float, ...]:
    return (-found.best.scheme.bits, found.best.scheme.name != "fp8", *rank(request, found.best))


class _SiteSearch:
    """One request on one set of devices."""

    def __init__(self, request: PlanRequest, site: Site, sizes: ModelShards, refused: list[str]) -> None:
        self.request, self.site, self.sizes, self.refused = replace(request, hardware=site.hardware), site, sizes, refused

    def on_devices(self) -> SearchResult | None:
        """The least lossy scheme that fits; the others are runners-up."""
        if _device_bytes(self.request.hardware) < least_bytes(self.request.rules):
            return None
        ranked = self._quick_first(
            [(how, found) for how in schemes(self.request) if (found := self._fitting(how) or self._nearly(how))]
        )
        for place, (_, found) in enumerate(ranked):
            for candidate in found:
                best = self._whole(candidate)
                if best.fits:
                    rest = [others[0] for _, others in ranked[place + 1 :]]
                    return SearchResult(best=best, others=runners_up(candidate, found, rest), site=self.site)
        return None

    def _quick_first(self, ranked: list[tuple[Scheme, list[Candidate]]]) -> list[tuple[Scheme, list[Candidate]]]:
        """Where output counts, fp8 before bf16 if it gives much more: devices have units for it, and its loss is next to none."""
        if self.request.goal == "latency" or [how.name for how, _ in ranked[:2]] != ["bf16", "fp8"]:
            return ranked
        (_, whole), (_, half) = ranked[:2]
        gains = half[0].speed.sustained_tokens_per_second / whole[0].speed.sustained_tokens_per_second
        return [ranked[1], ranked[0], *ranked[2:]] if gains > MUCH else ranked

    def _nearly(self, how: Scheme) -> list[Candidate]:
        """If most of the sequences fit at full length, all run at their mean length, as servers do it: better than fewer bits for all."""
        asked = self.request.concurrency or 1
        if asked == 1 or self.request.queue or self.request.first_engine or not self.request.waits:
            return []
        most = self._asking(concurrency=ceil(MOST_OF_THEM * asked), waits=False)
        return self._asking(queue=True)._fitting(how) if most._fitting(how) else []

    def _asking(self, **changes: Any) -> _SiteSearch:
        return _SiteSearch(replace(self.request, **changes), self.site, self.sizes, [])

    def _whole(self, found: Candidate) -> Candidate:
        """Evaluates every device of the replica; with fewer sequences if a device that was not evaluated before is fuller."""
        whole = evaluate(self.sizes, self.site, found.engine, found.scheme, found.layout, found.workload, every=True)
        asked = self.request.concurrency is not None and not self.request.queue
        many = not asked and found.workload.concurrency > found.layout.dp
        if whole.fits or not many:
            return whole
        fewer = max(int(found.workload.concurrency * 0.9), found.layout.dp)
        return self._whole(replace(found, workload=msgspec.structs.replace(found.workload, concurrency=fewer)))

    def _fitting(self, how: Scheme) -> list[Candidate]:
        """Fitting candidates of one scheme, best first. Layouts that leave devices idle, or with a tp group across nodes, only if
        there are no others."""
        able = sorted(preferred(self.request, engines(self.request)), key=lambda one: self._untuned(one, how))
        able = [one for one in able if loads_scheme(one, how.name) or self.request.stored is not None or one.name == "windlass"]
        able = [one for one in able if self._serves(one) and not one.only_offload] or able
        asked = able[:1] if self.request.first_engine else able
        tried = (fitting for one in asked if (fitting := self._of_engine(one, how)))
        first = next(tried, list[Candidate]())
        if not first or not self._personal():
            return first
        return max((first, *tried), key=lambda found: found[0].speed.decode_tokens_per_second * (MUCH if found is first else 1.0))

    def _of_engine(self, one: EngineProfile, how: Scheme) -> list[Candidate]:
        for idle in (False, True):
            fitting = self._candidates(one, how, idle)
            if fitting:
                near = [found for found in fitting if not self._far(found.layout)]
                return self._serving_first(sorted(near or fitting, key=lambda found: rank(self.request, found)))
        return []

    def _serving_first(self, ranked: list[Candidate]) -> list[Candidate]:
        """With a load, what serves most within its limits: of those with most output and those with the quickest steps."""
        load = self.request.load
        if load is None or self.request.concurrency is not None:
            return ranked
        few = 1 if len(self.site.devices) > LARGE else SHORTLIST
        quick = sorted(ranked[few:], key=lambda one: one.speed.step_seconds)[:few]
        tried = sorted([*ranked[:few], *quick], key=lambda one: -_most_served(load, one))
        return [*tried, *(one for one in ranked if not any(one is other for other in tried))]

    def _personal(self) -> bool:
        """One user at a card of a personal computer: there the quickest engine is recommended, not the one made for servers."""
        one = self.request.goal == "latency" and (self.request.concurrency or 1) == 1
        return one and len(self.site.devices) == 1 and device_class(self.site.devices[0]) == "consumer"

    def _serves(self, one: EngineProfile) -> bool:
        """Not an engine for a few users where many are asked for."""
        return not (self.request.concurrency or 1) > one.max_sequences <= BATCH_FOR_SERVER

    def _untuned(self, one: EngineProfile, how: Scheme) -> bool:
        """Our engine on a GPU without its own kernels for the model and the scheme: it runs, but others are faster."""
        if one.name != "windlass" or self.site.devices[0].kind == "cpu":
            return False
        return bool(how.name != "int4" or fused.unsupported(self.request.spec) or fused.unsupported_storage(how))

    def _far(self, layout: Layout) -> bool:
        return self.site.group_spans_nodes(layout) and self.site.devices[0].kind != "cpu"

    def _candidates(self, one: EngineProfile, how: Scheme, idle: bool) -> list[Candidate]:
        found: list[Candidate] = []
        tried: dict[tuple[int, int], int] = {}
        for layout in self._layouts(one, how, idle):
            key = (layout.tp, layout.ep)
            if tried.get(key, 0) >= 3 and len(self.site.devices) > LARGE:
                continue
            candidate = self._evaluate(one, how, layout)
            if candidate is not None and candidate.fits:
                tried[key] = tried.get(key, 0) + 1
                found.append(candidate)
        return found

    def _layouts(self, one: EngineProfile, how: Scheme, idle: bool) -> Iterator[Layout]:
        request, devices = self.request, len(self.site.devices)
        if idle and (devices > LARGE or request.pins):
            return
        replicas = request.concurrency or (1 if request.goal == "latency" else None)
        for layout in layouts(request.spec, one, devices, request.pins, replicas=replicas, idle=idle):
            if layout.dp > 1 and not self.site.uniform:
                self.refused.append(f"dp {layout.dp}: replicas over unequal devices are not supported; use --dp 1")
                continue
            try:
                check_layout(one, request.spec, request.rules, how, layout)
            except Impossible as error:
                self.refused.append(str(error))
                continue
            yield layout

    def _evaluate(self, one: EngineProfile, how: Scheme, layout: Layout) -> Candidate | None:
        work = request_workload(self.request)
        if self.request.concurrency is None and self.request.goal != "latency":
            return most_sequences(self.sizes, self.site, one, how, layout, work)
        if self.request.queue:
            return queued(self.sizes, self.site, one, how, layout, work)
        return evaluate(self.sizes, self.site, one, how, layout, work)

    def spilled(self) -> SearchResult | None:
        """Offloads weights to host memory and disk, smallest scheme first; what still does not fit is counted as short."""
        found: list[Candidate] = []
        for how in sorted(schemes(self.request), key=lambda one: one.bits):
            for one in sorted(engines(self.request), key=lambda one: not one.offload):
                for layout in self._layouts(one, how, idle=False):
                    if (
                        layout.dp == 1 or not one.offload or "dp" in self.request.pins
                    ):  # no replicas of a model that does not fit once
                        found += self._spills(one, how, layout)
            if any(candidate.fits for candidate in found):
                break
        if not found:
            return None
        found.sort(
            key=lambda one: (
                one.fit.short_bytes, self._far(one.layout), _never_run(one), not _own_offload(one), *rank(self.request, one)
            )
        )  # fmt: skip
        fitting = [candidate for candidate in found[1:] if candidate.fits and candidate.layout != found[0].layout]
        return SearchResult(best=found[0], others=runners_up(found[0], fitting, []), site=self.site)

    def _spills(self, one: EngineProfile, how: Scheme, layout: Layout) -> Iterator[Candidate]:
        """For throughput, several sequences share one pass over the streamed weights."""
        work = request_workload(self.request)
        many = self.request.concurrency is None and self.request.goal != "latency"
        for count in SPILLED_SEQUENCES if many else (work.concurrency,):
            changed = msgspec.structs.replace(work, concurrency=count)
            yield evaluate(self.sizes, self.site, one, how, layout, changed, spill=True)


SPILLED_SEQUENCES = (1, 4, 16, 64)
MUCH = 1.3
"""More than predictions err."""
MOST_OF_THEM = 0.75
SHORTLIST = 3
"""Candidates whose load is worked out, of either kind."""


def _own_offload(found: Candidate) -> bool:
    """Experts beside one GPU with our kernels: CPU and link work together, which was measured at twice the speed of the others. With experts on disk
    below it was run (GLM-4.5-Air with 14 layers) and not compared: the predicted speeds decide."""
    return _has_run(found) and not found.fit.disk_bytes


def _has_run(found: Candidate) -> bool:
    return found.engine.name == "windlass" and found.layout.world == 1 and found.times.offloads


def _never_run(found: Candidate) -> bool:
    """Paths of our engine beside a GPU that are planned for only: others do it today."""
    beside = any(slot.device.kind != "cpu" for slot in found.fit.slots)
    return found.engine.name == "windlass" and beside and not _has_run(found)


def runners_up(best: Candidate, ranked: list[Candidate], other_schemes: list[Candidate]) -> tuple[Candidate, ...]:
    """Up to two: another layout and another scheme; or two other layouts."""
    layouts_ = [one for one in ranked if (one.layout.tp, one.layout.pp) != (best.layout.tp, best.layout.pp)]
    chosen = [*layouts_[:1], *other_schemes[-1:], *layouts_[1:]]
    return tuple(chosen[:2])


def _no_layout(request: PlanRequest, refused: list[str]) -> str:
    """Why the requested layout is impossible, and the nearest ones that work on the same devices."""
    why = refused[0] if refused else f"no layout of {request.spec.name} works on {request.hardware.description}"
    requested = Layout(**{name: request.pins.get(name, 1) for name in ("tp", "pp", "ep", "dp")})
    one, how = preferred(request, engines(request))[0], schemes(request)[0]
    working = working_layouts(one, request.spec, request.rules, how, requested, request.hardware.num_devices)
    return f"{why}; on {request.hardware.num_devices} devices use {working}" if working else why


def _most_served(load: LoadRequest, candidate: Candidate) -> float:
    """Requests per second of all replicas within the limits; 0 if not even one at a time keeps them."""
    most = max(candidate.workload.concurrency // candidate.layout.dp, 1)
    return round(ServedLoad(candidate.times, most).most_within(load.first_seconds, load.between_seconds) * candidate.layout.dp, 3)


def rank(request: PlanRequest, candidate: Candidate) -> tuple[float, ...]:
    """Sort key, smaller is better. Ties go to fewer stages, then to less expert parallelism."""
    speed, layout = candidate.speed, candidate.layout
    plain = (float(layout.pp), float(layout.ep), float(layout.tp))
    if candidate.workload.waiting:
        return (-round(speed.sustained_tokens_per_second, 1), *plain)
    if request.goal == "latency":
        return (round(speed.step_seconds, 6), round(speed.time_to_first_token_seconds, 4), *plain)
    if request.goal == "throughput":
        return (-round(speed.sustained_tokens_per_second, 1), *plain)
    priced = cost_of(request.hardware.devices[: layout.world], speed.sustained_tokens_per_second)
    return (priced.usd_per_million_output_tokens or -speed.sustained_tokens_per_second, *plain)
