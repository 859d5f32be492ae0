"""The search over engines, schemes, layouts and memory tiers. Pure.

Order of preference: the least lossy scheme whose weights and KV cache fit on the devices; within it, the best layout for the goal.
Weights are offloaded to host memory and disk only if no scheme fits, and then in the smallest scheme.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import msgspec

from windlass.core import fused
from windlass.core.hardware.measured import MeasuredRun
from windlass.core.hardware.spec import Hardware
from windlass.core.layout import Layout
from windlass.core.model import ModelSpec
from windlass.core.rule import Rule
from windlass.core.scheme import KV_BYTES, Scheme, scheme
from windlass.core.workload import GOALS, Workload, workload
from windlass.errors import BadInput, Impossible
from windlass.plan.cost.running import cost_of
from windlass.plan.engines.classes import device_class
from windlass.plan.engines.load import NAMES, engine, loads_scheme
from windlass.plan.engines.profile import EngineProfile
from windlass.plan.engines.tried import not_run_yet
from windlass.plan.inference.advice import BATCH_FOR_SERVER
from windlass.plan.inference.candidates import Candidate, evaluate, most_sequences, queued
from windlass.plan.inference.feasible import check_layout, check_pins, layouts, working_layouts
from windlass.plan.inference.sites import Site, raised_limit, sites
from windlass.plan.shards import ModelShards, shards_of

LARGE = 64
"""Above this many devices, only the three shortest pipelines that fit are tried per (tp, ep): longer ones only add latency."""


@dataclass(frozen=True)
class LoadRequest:
    """A stream of requests, and the limits of their times."""

    rate: float
    first_seconds: float
    between_seconds: float


@dataclass(frozen=True)
class PlanRequest:
    """What to plan: model, hardware, workload, and what the user pinned."""

    spec: ModelSpec
    rules: tuple[Rule, ...]
    hardware: Hardware
    context_tokens: int
    concurrency: int | None = None
    """None: 1 for latency; as many as fit for throughput and cost."""
    goal: str = "latency"
    engine: str = "auto"
    quant: str = "auto"
    group: int = 128
    kv: str = "bf16"
    pins: dict[str, int] = field(default_factory=dict[str, int])
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    requests: int = 0
    """A burst of so many requests at once; 0: a steady stream."""
    spread: bool = False
    """Its answers differ in length, as those of a chat log do."""
    explain: bool = False
    load: LoadRequest | None = None
    measured: tuple[MeasuredRun, ...] = ()
    """Benchmark runs of this machine."""
    last_resort: bool = False
    """Nothing else can do it: a path of our engine that was never run is better than none, and is said to be one."""
    first_engine: bool = False
    """Try no other engine than the one that comes first."""
    waits: bool = True
    """Sequences that do not fit into memory at once may wait; otherwise all of them must fit at full length."""
    queue: bool = False
    """Let them wait: the search sets it where they do not all fit."""
    draft_tokens: int = 0
    acceptance: float = 0.0
    cached_prefix: float = 0.0
    region: str = "world"
    stored: Scheme | None = None
    """How the files on this disk are quantized, or those that would be downloaded; None: they are not, or only the published config is known."""
    stored_why: str = ""
    """Which files these are, if they are not the ones that were named."""


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
        ranked = [(how, found) for how in schemes(self.request) if (found := self._fitting(how))]
        for place, (_, found) in enumerate(ranked):
            for candidate in found:
                best = self._whole(candidate)
                if best.fits:
                    rest = [others[0] for _, others in ranked[place + 1 :]]
                    return SearchResult(best=best, others=runners_up(candidate, found, rest), site=self.site)
        return None

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
        able = [one for one in able if self._serves(one)] or able
        for one in able[:1] if self.request.first_engine else able:
            for idle in (False, True):
                fitting = self._candidates(one, how, idle)
                if fitting:
                    near = [found for found in fitting if not self._far(found.layout)]
                    return sorted(near or fitting, key=lambda found: rank(self.request, found))
        return []

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
        found.sort(key=lambda one: (one.fit.short_bytes, self._far(one.layout), not _own_offload(one), *rank(self.request, one)))
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


def _own_offload(found: Candidate) -> bool:
    """Experts beside one GPU with our kernels: CPU and link work together, which was measured at twice the speed of the others."""
    return found.engine.name == "windlass" and found.layout.world == 1 and not found.fit.disk_bytes and found.times.offloads


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


def check(request: PlanRequest) -> None:
    spec = request.spec
    if request.context_tokens > spec.context_tokens:
        raise Impossible(
            f"--context {request.context_tokens:,} exceeds the {spec.context_tokens:,} tokens of {spec.name}; "
            f"use --context {spec.context_tokens} or less"
        )
    if request.context_tokens < 1:
        raise BadInput("--context must be at least 1")
    if request.concurrency is not None and not 1 <= request.concurrency <= 10**6:
        raise BadInput("--concurrency must be from 1 to 1,000,000")
    if request.goal not in GOALS:
        raise BadInput(f"--goal must be one of {', '.join(GOALS)}, not {request.goal!r}")
    for name in ("prompt_tokens", "new_tokens"):
        value = getattr(request, name)
        if value is not None and value < 1:
            raise BadInput(f"--{name.replace('_', '-')} must be at least 1")
    if not 0 <= request.draft_tokens <= 16 or not 0 <= request.acceptance <= 1 or not 0 <= request.cached_prefix < 1:
        raise BadInput("--drafts is from 0 to 16, --acceptance from 0 to 1, --cached-prefix from 0 to less than 1")
    if not 0 <= request.requests <= 10**7:
        raise BadInput("--requests must be from 1 to 10,000,000")
    work = request_workload(request)
    if work.prompt_tokens + work.new_tokens > max(request.context_tokens, 2):
        raise BadInput(
            f"--prompt-tokens {work.prompt_tokens:,} plus --new-tokens {work.new_tokens:,} exceed --context {request.context_tokens:,}"
        )
    scheme("int4", request.group)  # refuses an invalid group size whatever the scheme
    check_pins(spec, request.hardware.num_devices, request.pins)


def runs_on(found: EngineProfile, request: PlanRequest) -> bool:
    return supports(found, request.spec) and not _unsupported_kinds(found, request)


def supports(found: EngineProfile, spec: ModelSpec) -> bool:
    """Peers take their models from the same published architectures as vLLM, which is asked for all of them."""
    return (found.name if found.name == "windlass" else "vllm") in spec.engines


def _unsupported_kinds(found: EngineProfile, request: PlanRequest) -> set[str]:
    """Device kinds that the engine does not support."""
    extra = found.kinds_on_request if request.engine == found.name else ()
    return {device.kind for device in request.hardware.distinct_devices} - {*found.kinds, *extra}


def engines(request: PlanRequest) -> list[EngineProfile]:
    """The one set with --engine, or all that run the model on these devices today; if none does, the embedded one for its memory model."""
    if request.engine != "auto":
        found = engine(request.engine)
        unsupported = _unsupported_kinds(found, request)
        if unsupported:
            raise Impossible(
                f"{found.title} does not support {', '.join(sorted(unsupported))} devices; use --engine {_for_kinds(request)}"
            )
        if request.spec.engines and not supports(found, request.spec):
            others = " or ".join(request.spec.engines)
            raise Impossible(f"{found.name} does not support {request.spec.name} ({request.spec.family}); use --engine {others}")
        _check_scheme(found, request)
        return [found]
    return [found for found in map(engine, _choices(request)) if runs_on(found, request) and _loads(found, request)] or [
        engine("windlass")
    ]


def _choices(request: PlanRequest) -> tuple[str, ...]:
    """Engines worth trying on these devices, without those paths of ours that were never run."""
    devices = request.hardware.distinct_devices
    kinds = {device.kind for device in devices}
    peers = ("mlx", "llama.cpp") if kinds == {"metal"} else ("llama.cpp",) if "cpu" in kinds else ("vllm", "llama.cpp")
    if request.hardware.num_devices == 1 and device_class(devices[0]) in ("unified", "rdna"):
        peers = ("llama.cpp", "vllm")  # what people run there, and the faster of the two where both were measured
    one = 1 if kinds == {"cpu"} else request.hardware.num_devices
    tried = not not_run_yet(devices, one, offloads=False, to_disk=False, has_kernels=False)
    return ("windlass", *peers) if tried or request.last_resort else peers


def _for_kinds(request: PlanRequest) -> str:
    kinds = {device.kind for device in request.hardware.distinct_devices}
    return "mlx" if kinds == {"metal"} else "llama.cpp"


def _scheme_name(request: PlanRequest) -> str:
    return request.quant if request.quant != "auto" else request.stored.name if request.stored is not None else ""


def _loads(found: EngineProfile, request: PlanRequest) -> bool:
    own_files = found.name == "windlass" and request.quant == "auto"  # whatever Windlass has opened, it loads
    name = _scheme_name(request)
    return (not name or own_files or loads_scheme(found, name)) and (request.kv in found.caches or request.kv not in KV_BYTES)


def _check_scheme(found: EngineProfile, request: PlanRequest) -> None:
    if request.kv in KV_BYTES and request.kv not in found.caches:
        able = [name for name in NAMES if request.kv in engine(name).caches]
        raise Impossible(
            f"{found.title} has no KV cache in {request.kv}, only in {', '.join(found.caches)}; use --engine {' or '.join(able)}"
        )
    if not _loads(found, request):
        able = [name for name in NAMES if loads_scheme(engine(name), _scheme_name(request))]
        raise Impossible(f"{found.title} does not load {_scheme_name(request)} files; use --engine {' or '.join(able) or 'auto'}")


def schemes(request: PlanRequest) -> list[Scheme]:
    """Least lossy first. Files that are quantized run as they are; a checkpoint published in fewer bits is not converted to more; fp8
    needs a device with units for it."""
    only = _cpu_schemes(request)
    if request.quant != "auto":
        if only and request.quant not in only:
            raise Impossible(
                f"{request.engine} supports {' and '.join(only)} on a CPU, not {request.quant}; use --engine windlass"
            )
        return [scheme(request.quant, request.group, request.kv)]
    if only:
        return [scheme(only[0], request.group, request.kv)]
    if request.stored is not None:
        return [msgspec.structs.replace(request.stored, kv=request.kv)]
    order = ["bf16", "fp8", "int8", "int4"]
    native = request.spec.native_scheme
    if native == "mxfp4":
        order = ["mxfp4", "int4"]
    elif native == "fp8":
        order = ["fp8", "int8", "int4"]
    if any("fp8" not in device.flops for device in request.hardware.distinct_devices):
        order = [name for name in order if name != "fp8"] or ["int8", "int4"]
    return [scheme(name, request.group, request.kv) for name in order]


def _cpu_schemes(request: PlanRequest) -> tuple[str, ...]:
    on_cpu = any(device.kind == "cpu" for device in request.hardware.distinct_devices)
    return engine(request.engine).cpu_schemes if on_cpu and request.engine != "auto" else ()


def request_workload(request: PlanRequest) -> Workload:
    made = workload(
        request.context_tokens,
        request.concurrency or 1,
        request.goal,
        prompt_tokens=request.prompt_tokens,
        new_tokens=request.new_tokens,
    )
    return msgspec.structs.replace(
        made,
        requests=request.requests,
        spread=request.spread,
        draft_tokens=request.draft_tokens,
        acceptance=request.acceptance,
        cached_prefix=request.cached_prefix,
    )


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


def preferred(request: PlanRequest, available: list[EngineProfile]) -> list[EngineProfile]:
    """The embedded engine first, unless the concurrency is high or the goal is throughput or cost."""
    many = request.concurrency > BATCH_FOR_SERVER if request.concurrency else request.goal != "latency"
    first = "vllm" if many else "windlass"
    return sorted(available, key=lambda found: found.name != first)
