"""The search: engines, schemes, layouts and tiers, from what is least lossy and fits to what fits at all. Pure.

Order of preference: the least lossy scheme whose weights and cache fit the devices; within it, the layout that serves the goal.
Only where no scheme fits are weights sent to host memory and disk, in the smallest scheme.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from windlass.core.hardware import Hardware
from windlass.core.layout import Layout
from windlass.core.model import ModelSpec
from windlass.core.rule import Rule
from windlass.core.scheme import Scheme, scheme
from windlass.core.workload import GOALS, Workload, workload
from windlass.errors import BadInput, Impossible
from windlass.plan.candidates import Candidate, Site, evaluate, most_sequences
from windlass.plan.cost import cost_of
from windlass.plan.engines import ENGINES, Engine, engine
from windlass.plan.feasible import check_layout, check_pins, layouts, working_layouts
from windlass.plan.shards import Sizes

LARGE = 64
"""From this many devices on, only the few shortest pipelines that fit are tried for each tp: longer ones only add latency."""


@dataclass(frozen=True)
class Question:
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
class Answer:
    """The chosen candidate, the runners-up, and what was learnt on the way."""

    best: Candidate
    others: tuple[Candidate, ...]
    refused: tuple[str, ...]


def answer(question: Question) -> Answer:
    check(question)
    site, sizes = Site(question.hardware), Sizes(question.spec, question.rules)
    refused: list[str] = []
    found = [_best_of(question, site, sizes, one, refused) for one in schemes(question)]
    fitting = [ranked for ranked in found if ranked]
    if fitting:
        chosen, rest = fitting[0], [ranked[0] for ranked in fitting[1:]]
        return _answer(question, site, sizes, [*chosen, *rest], refused)
    spilled = _spilled(question, site, sizes)
    if not spilled:
        raise Impossible(_no_layout(question, refused))
    return _answer(question, site, sizes, spilled, refused)


def _answer(question: Question, site: Site, sizes: Sizes, ranked: list[Candidate], refused: list[str]) -> Answer:
    """The winner again, with every device of its replica looked at."""
    first = ranked[0]
    spill = bool(first.fit.host_bytes or first.fit.disk_bytes or first.fit.short_bytes)
    best = evaluate(sizes, site, first.engine, first.scheme, first.layout, first.workload, spill=spill, every=True)
    others = tuple(candidate for candidate in ranked[1:] if candidate.fits)[:2]
    return Answer(best=best, others=others, refused=tuple(dict.fromkeys(refused)))


def _no_layout(question: Question, refused: list[str]) -> str:
    """Why the asked-for layout is impossible, and the nearest that work on the same devices."""
    why = refused[0] if refused else f"{question.spec.name} has no layout on {question.hardware.description}"
    asked = Layout(**{name: question.pins.get(name, 1) for name in ("tp", "pp", "ep", "dp")})
    how = schemes(question)[0]
    working = working_layouts(engines(question)[0], question.spec, question.rules, how, asked, question.hardware.num_devices)
    return f"{why}; on {question.hardware.num_devices} devices use {working}" if working else why


def check(question: Question) -> None:
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
    check_pins(spec, question.hardware.num_devices, question.pins)


def runs_on(found: Engine, question: Question) -> bool:
    kinds = {device.kind for device in question.hardware.distinct_devices}
    return found.name in question.spec.engines and not kinds - set(found.kinds)


def engines(question: Question) -> list[Engine]:
    """Asked for, or all that run the model on these devices; where none does, the embedded one lends its memory model."""
    kinds = {device.kind for device in question.hardware.distinct_devices}
    if question.engine != "auto":
        found = engine(question.engine)
        if kinds - set(found.kinds):
            raise Impossible(
                f"{found.name} does not run on {', '.join(sorted(kinds - set(found.kinds)))} devices; use --engine windlass"
            )
        if question.spec.engines and found.name not in question.spec.engines:
            others = " or ".join(question.spec.engines)
            raise Impossible(f"{found.name} does not run {question.spec.name} ({question.spec.family}); use --engine {others}")
        return [found]
    return [found for found in ENGINES.values() if runs_on(found, question)] or [ENGINES["windlass"]]


def schemes(question: Question) -> list[Scheme]:
    """Least lossy first. A checkpoint published in fewer bits is not widened again; fp8 needs an accelerator."""
    if question.quant != "auto":
        return [scheme(question.quant, question.group, question.kv)]
    order = ["bf16", "fp8", "int8", "int4"]
    native = question.spec.native_scheme
    if native == "mxfp4":
        order = ["mxfp4", "int4"]
    elif native == "fp8":
        order = ["fp8", "int8", "int4"]
    if any(device.kind in ("cpu", "metal") for device in question.hardware.distinct_devices):
        order = [name for name in order if name != "fp8"] or ["int8", "int4"]
    return [scheme(name, question.group, question.kv) for name in order]


def question_workload(question: Question) -> Workload:
    return workload(
        question.context_tokens,
        question.concurrency or 1,
        question.goal,
        prompt_tokens=question.prompt_tokens,
        new_tokens=question.new_tokens,
    )


def _accepted(question: Question, one: Engine, how: Scheme, refused: list[str]) -> Iterator[Layout]:
    for layout in layouts(question.spec, question.hardware.num_devices, question.pins):
        try:
            check_layout(one, question.spec, question.rules, how, layout)
        except Impossible as error:
            refused.append(str(error))
            continue
        yield layout


def _best_of(question: Question, site: Site, sizes: Sizes, how: Scheme, refused: list[str]) -> list[Candidate]:
    """Fitting candidates of one scheme, best first."""
    found: list[Candidate] = []
    for one in preferred(question, engines(question)):
        tried: dict[tuple[int, int], int] = {}
        for layout in _accepted(question, one, how, refused):
            if not site.uniform and layout.dp > 1:
                continue
            key = (layout.tp, layout.ep)
            if tried.get(key, 0) >= 3 and question.hardware.num_devices > LARGE:
                continue
            candidate = _evaluate(question, site, sizes, one, how, layout)
            if candidate is not None and candidate.fits:
                tried[key] = tried.get(key, 0) + 1
                found.append(candidate)
        if found and question.engine == "auto":
            break
    return sorted(found, key=lambda candidate: rank(question, candidate))


def _evaluate(question: Question, site: Site, sizes: Sizes, one: Engine, how: Scheme, layout: Layout) -> Candidate | None:
    work = question_workload(question)
    if question.concurrency is None and question.goal != "latency":
        return most_sequences(sizes, site, one, how, layout, work)
    return evaluate(sizes, site, one, how, layout, work)


def rank(question: Question, candidate: Candidate) -> tuple[float, ...]:
    """Smaller is better. Ties go to fewer stages, then to plainer experts."""
    speed, layout = candidate.speed, candidate.layout
    plain = (float(layout.pp), float(layout.ep), float(layout.tp))
    if question.goal == "latency":
        return (round(speed.step_seconds, 6), round(speed.time_to_first_token_seconds, 4), *plain)
    if question.goal == "throughput":
        return (-round(speed.sustained_tokens_per_second, 1), *plain)
    priced = cost_of(question.hardware.devices[: layout.world], speed.sustained_tokens_per_second)
    return (priced.usd_per_million_output_tokens or -speed.sustained_tokens_per_second, *plain)


BATCH_FOR_SERVER = 64
"""Sequences at once from which a server built for batches is the better engine."""


def preferred(question: Question, available: list[Engine]) -> list[Engine]:
    """Embedded unless the load calls for a server: many sequences, or throughput as the goal, or several nodes of accelerators."""
    crowded = (question.concurrency or (1 if question.goal == "latency" else BATCH_FOR_SERVER)) >= BATCH_FOR_SERVER
    return sorted(available, key=lambda found: (found.name != "vllm") if crowded else (found.name != "windlass"))


def _spilled(question: Question, site: Site, sizes: Sizes) -> list[Candidate]:
    """Nothing fits the devices: weights go to host memory and disk, smallest scheme first; what cannot be placed is short."""
    work = question_workload(question)
    found: list[Candidate] = []
    for how in sorted(schemes(question), key=lambda one: one.bits):
        for one in sorted(engines(question), key=lambda one: not one.offload):
            for layout in _accepted(question, one, how, []):
                if not site.uniform and layout.dp > 1:
                    continue
                if layout.dp > 1 and one.offload and "dp" not in question.pins:
                    continue  # replicas of what does not fit once
                found.append(evaluate(sizes, site, one, how, layout, work, spill=True))
        if any(candidate.fits for candidate in found):
            break
    return sorted(found, key=lambda candidate: (candidate.fit.short_bytes, *rank(question, candidate)))
