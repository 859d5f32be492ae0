"""The search: engines, schemes, layouts and tiers, from what is least lossy and fits to what fits at all. Pure.

Order of preference: the least lossy scheme whose weights and cache fit the devices; within it, the layout that serves the goal.
Only where no scheme fits are weights sent to host memory and disk, in the smallest scheme.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import msgspec

from windlass.core.hardware.spec import Hardware
from windlass.core.layout import Layout
from windlass.core.model import ModelSpec
from windlass.core.rule import Rule
from windlass.core.scheme import Scheme, scheme
from windlass.core.workload import GOALS, Workload, workload
from windlass.errors import BadInput, Impossible
from windlass.plan.cost.running import cost_of
from windlass.plan.engines import ENGINES, EngineProfile, engine
from windlass.plan.inference.advice import BATCH_FOR_SERVER
from windlass.plan.inference.candidates import Candidate, evaluate, most_sequences
from windlass.plan.inference.feasible import check_layout, check_pins, layouts, working_layouts
from windlass.plan.inference.sites import Site, sites
from windlass.plan.shards import ModelShards

LARGE = 64
"""From this many devices on, only the few shortest pipelines that fit are tried for each tp: longer ones only add latency."""


@dataclass(frozen=True)
class PlanRequest:
    """What was asked, before anything is decided."""

    spec: ModelSpec
    rules: tuple[Rule, ...]
    hardware: Hardware
    context_tokens: int
    concurrency: int | None = None
    """None: one sequence for latency; as many as fit for throughput and cost."""
    goal: str = "latency"
    engine: str = "auto"
    quant: str = "auto"
    group: int = 128
    kv: str = "bf16"
    pins: dict[str, int] = field(default_factory=dict[str, int])
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    region: str = "world"


@dataclass(frozen=True)
class SearchResult:
    """The chosen candidate, the runners-up, and the devices they are for."""

    best: Candidate
    others: tuple[Candidate, ...]
    site: Site


def search(question: PlanRequest) -> SearchResult:
    """The best plan that keeps everything on the devices; else the best with weights outside; else the one that lacks least."""
    check(question)
    sizes = ModelShards(question.spec, question.rules)
    refused: list[str] = []
    tiers = [[_SiteSearch(question, site, sizes, refused) for site in tier] for tier in sites(question.hardware)]
    for tier in tiers:
        found = [one for search in tier if (one := search.on_devices()) is not None]
        if found:
            return min(found, key=lambda one: _preference(question, one))
    spilled = [one for tier in tiers for search in tier if (one := search.spilled()) is not None]
    if not spilled:
        raise Impossible(_no_layout(question, refused))
    return min(spilled, key=lambda one: (one.best.fit.short_bytes, *rank(question, one.best)))


def _preference(question: PlanRequest, found: SearchResult) -> tuple[float, ...]:
    return (-found.best.scheme.bits, found.best.scheme.name != "fp8", *rank(question, found.best))


class _SiteSearch:
    """One question on one set of devices."""

    def __init__(self, question: PlanRequest, site: Site, sizes: ModelShards, refused: list[str]) -> None:
        self.question, self.site, self.sizes, self.refused = replace(question, hardware=site.hardware), site, sizes, refused

    def on_devices(self) -> SearchResult | None:
        """The least lossy scheme that fits; other schemes are runners-up."""
        ranked = [(how, found) for how in schemes(self.question) if (found := self._fitting(how))]
        for place, (_, found) in enumerate(ranked):
            for candidate in found:
                best = self._whole(candidate)
                if best.fits:
                    rest = [others[0] for _, others in ranked[place + 1 :]]
                    return SearchResult(best=best, others=runners_up(candidate, found, rest), site=self.site)
        return None

    def _whole(self, found: Candidate) -> Candidate:
        """Again, with every device of the replica looked at; a few sequences fewer where a rank that was passed over is fuller."""
        whole = evaluate(self.sizes, self.site, found.engine, found.scheme, found.layout, found.workload, every=True)
        many = self.question.concurrency is None and found.workload.concurrency > found.layout.dp
        if whole.fits or not many:
            return whole
        fewer = max(int(found.workload.concurrency * 0.9), found.layout.dp)
        return self._whole(replace(found, workload=msgspec.structs.replace(found.workload, concurrency=fewer)))

    def _fitting(self, how: Scheme) -> list[Candidate]:
        """Fitting candidates of one scheme, best first. Layouts that leave devices idle, or share layers over the network, only
        where there is nothing else."""
        for one in preferred(self.question, engines(self.question)):
            for idle in (False, True):
                fitting = self._candidates(one, how, idle)
                if fitting:
                    near = [found for found in fitting if not self._far(found.layout)]
                    return sorted(near or fitting, key=lambda found: rank(self.question, found))
        return []

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
        question, devices = self.question, len(self.site.devices)
        if idle and (devices > LARGE or question.pins):
            return
        replicas = question.concurrency or (1 if question.goal == "latency" else None)
        for layout in layouts(question.spec, one, devices, question.pins, replicas=replicas, idle=idle):
            if layout.dp > 1 and not self.site.uniform:
                self.refused.append(f"dp {layout.dp}: replicas over unlike devices are not planned; use --dp 1")
                continue
            try:
                check_layout(one, question.spec, question.rules, how, layout)
            except Impossible as error:
                self.refused.append(str(error))
                continue
            yield layout

    def _evaluate(self, one: EngineProfile, how: Scheme, layout: Layout) -> Candidate | None:
        work = question_workload(self.question)
        if self.question.concurrency is None and self.question.goal != "latency":
            return most_sequences(self.sizes, self.site, one, how, layout, work)
        return evaluate(self.sizes, self.site, one, how, layout, work)

    def spilled(self) -> SearchResult | None:
        """Nothing fits the devices: weights go to host memory and disk, smallest scheme first; what cannot be placed is short."""
        found: list[Candidate] = []
        for how in sorted(schemes(self.question), key=lambda one: one.bits):
            for one in sorted(engines(self.question), key=lambda one: not one.offload):
                for layout in self._layouts(one, how, idle=False):
                    if layout.dp == 1 or not one.offload or "dp" in self.question.pins:  # no replicas of what does not fit once
                        found += self._spills(one, how, layout)
            if any(candidate.fits for candidate in found):
                break
        if not found:
            return None
        found.sort(key=lambda one: (one.fit.short_bytes, self._far(one.layout), *rank(self.question, one)))
        fitting = [candidate for candidate in found[1:] if candidate.fits and candidate.layout != found[0].layout]
        return SearchResult(best=found[0], others=runners_up(found[0], fitting, []), site=self.site)

    def _spills(self, one: EngineProfile, how: Scheme, layout: Layout) -> Iterator[Candidate]:
        """With throughput as the goal, several sequences share what is streamed."""
        work = question_workload(self.question)
        many = self.question.concurrency is None and self.question.goal != "latency"
        for count in SPILLED_SEQUENCES if many else (work.concurrency,):
            changed = msgspec.structs.replace(work, concurrency=count)
            yield evaluate(self.sizes, self.site, one, how, layout, changed, spill=True)


SPILLED_SEQUENCES = (1, 4, 16, 64)


def runners_up(best: Candidate, ranked: list[Candidate], other_schemes: list[Candidate]) -> tuple[Candidate, ...]:
    """Two that differ in kind: another layout, and another scheme; two layouts where there is one scheme."""
    layouts_ = [one for one in ranked if (one.layout.tp, one.layout.pp) != (best.layout.tp, best.layout.pp)]
    chosen = [*layouts_[:1], *other_schemes[-1:], *layouts_[1:]]
    return tuple(chosen[:2])


def _no_layout(question: PlanRequest, refused: list[str]) -> str:
    """Why the asked-for layout is impossible, and the nearest that work on the same devices."""
    why = refused[0] if refused else f"{question.spec.name} has no layout on {question.hardware.description}"
    asked = Layout(**{name: question.pins.get(name, 1) for name in ("tp", "pp", "ep", "dp")})
    one, how = preferred(question, engines(question))[0], schemes(question)[0]
    working = working_layouts(one, question.spec, question.rules, how, asked, question.hardware.num_devices)
    return f"{why}; on {question.hardware.num_devices} devices use {working}" if working else why


def check(question: PlanRequest) -> None:
    spec = question.spec
    if question.context_tokens > spec.context_tokens:
        raise Impossible(
            f"a context of {question.context_tokens:,} tokens is beyond {spec.name}'s {spec.context_tokens:,}; "
            f"use --context {spec.context_tokens} or less"
        )
    if question.context_tokens < 1:
        raise BadInput("--context must be at least one token")
    if question.concurrency is not None and not 1 <= question.concurrency <= 10**6:
        raise BadInput("--concurrency must be from 1 to 1,000,000")
    if question.goal not in GOALS:
        raise BadInput(f"--goal is one of {', '.join(GOALS)}")
    for name in ("prompt_tokens", "new_tokens"):
        value = getattr(question, name)
        if value is not None and value < 1:
            raise BadInput(f"--{name.replace('_', '-')} must be at least 1")
    work = question_workload(question)
    if work.prompt_tokens + work.new_tokens > max(question.context_tokens, 2):
        raise BadInput(
            f"a prompt of {work.prompt_tokens:,} and an answer of {work.new_tokens:,} tokens exceed --context {question.context_tokens:,}"
        )
    scheme("int4", question.group)  # a group that no scheme takes is refused whatever the scheme
    check_pins(spec, question.hardware.num_devices, question.pins)


def runs_on(found: EngineProfile, question: PlanRequest) -> bool:
    return found.name in question.spec.engines and not _foreign_kinds(found, question)


def _foreign_kinds(found: EngineProfile, question: PlanRequest) -> set[str]:
    """Of the devices there are, those that the engine does not run on."""
    asked = found.kinds_if_asked if question.engine == found.name else ()
    return {device.kind for device in question.hardware.distinct_devices} - {*found.kinds, *asked}


def engines(question: PlanRequest) -> list[EngineProfile]:
    """Asked for, or all that run the model on these devices; where none does, the embedded one lends its memory model."""
    if question.engine != "auto":
        found = engine(question.engine)
        foreign = _foreign_kinds(found, question)
        if foreign:
            raise Impossible(f"{found.name} does not run on {', '.join(sorted(foreign))} devices; use --engine windlass")
        if question.spec.engines and found.name not in question.spec.engines:
            others = " or ".join(question.spec.engines)
            raise Impossible(f"{found.name} does not run {question.spec.name} ({question.spec.family}); use --engine {others}")
        return [found]
    return [found for found in ENGINES.values() if runs_on(found, question)] or [ENGINES["windlass"]]


def schemes(question: PlanRequest) -> list[Scheme]:
    """Least lossy first. A checkpoint published in fewer bits is not widened again; fp8 needs an accelerator."""
    only = _cpu_schemes(question)
    if question.quant != "auto":
        if only and question.quant not in only:
            raise Impossible(f"{question.engine} runs {' and '.join(only)} on a CPU, not {question.quant}; use --engine windlass")
        return [scheme(question.quant, question.group, question.kv)]
    if only:
        return [scheme(only[0], question.group, question.kv)]
    order = ["bf16", "fp8", "int8", "int4"]
    native = question.spec.native_scheme
    if native == "mxfp4":
        order = ["mxfp4", "int4"]
    elif native == "fp8":
        order = ["fp8", "int8", "int4"]
    if any(device.kind in ("cpu", "metal") for device in question.hardware.distinct_devices):
        order = [name for name in order if name != "fp8"] or ["int8", "int4"]
    return [scheme(name, question.group, question.kv) for name in order]


def _cpu_schemes(question: PlanRequest) -> tuple[str, ...]:
    on_cpu = any(device.kind == "cpu" for device in question.hardware.distinct_devices)
    return engine(question.engine).cpu_schemes if on_cpu and question.engine != "auto" else ()


def question_workload(question: PlanRequest) -> Workload:
    return workload(
        question.context_tokens,
        question.concurrency or 1,
        question.goal,
        prompt_tokens=question.prompt_tokens,
        new_tokens=question.new_tokens,
    )


def rank(question: PlanRequest, candidate: Candidate) -> tuple[float, ...]:
    """Smaller is better. Ties go to fewer stages, then to plainer experts."""
    speed, layout = candidate.speed, candidate.layout
    plain = (float(layout.pp), float(layout.ep), float(layout.tp))
    if question.goal == "latency":
        return (round(speed.step_seconds, 6), round(speed.time_to_first_token_seconds, 4), *plain)
    if question.goal == "throughput":
        return (-round(speed.sustained_tokens_per_second, 1), *plain)
    priced = cost_of(question.hardware.devices[: layout.world], speed.sustained_tokens_per_second)
    return (priced.usd_per_million_output_tokens or -speed.sustained_tokens_per_second, *plain)


def preferred(question: PlanRequest, available: list[EngineProfile]) -> list[EngineProfile]:
    """Embedded unless the load calls for a server: many sequences, or throughput as the goal, or several nodes of accelerators."""
    crowded = question.concurrency > BATCH_FOR_SERVER if question.concurrency else question.goal != "latency"
    return sorted(available, key=lambda found: (found.name != "vllm") if crowded else (found.name != "windlass"))
