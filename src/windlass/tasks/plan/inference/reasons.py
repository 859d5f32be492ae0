"""The reasons of an inference plan: why each value was chosen, with numbers."""

from __future__ import annotations

from windlass.core import fused
from windlass.core.layout import Layout
from windlass.core.model import Attention
from windlass.core.place import Placement
from windlass.core.plan import Alternative, Reason
from windlass.core.rule import AxisName
from windlass.errors import Impossible
from windlass.tasks.plan.engines.classes import device_class
from windlass.tasks.plan.engines.load import engine
from windlass.tasks.plan.inference.advice import BATCH_FOR_SERVER, AdviceInputs, advice_rows
from windlass.tasks.plan.inference.candidates import Candidate, why_not_offloaded
from windlass.tasks.plan.inference.feasible import check_layout, valid_tp
from windlass.tasks.plan.inference.search.best import SearchResult
from windlass.tasks.plan.inference.search.choices import runs_on
from windlass.tasks.plan.inference.search.request import PlanRequest
from windlass.units import format_bytes, format_context

LEAST_IMBALANCE = 1.005
"""Smaller imbalances are not reported."""


def reasons_for(request: PlanRequest, answer: SearchResult, placement: Placement) -> tuple[Reason, ...]:
    best = answer.best
    made = [
        _engine_reason(request, best),
        _scheme_reason(request, best),
        *_layout_reasons(request, best, placement),
        _context_reason(request, best),
        _concurrency_reason(request, best),
    ]
    made += _tier_reasons(best)
    made += _raised_reason(best)
    if not runs_on(best.engine, request):
        why = f"no engine supports {request.spec.name} on these devices; only its memory is planned"
        made.append(Reason(choice="scope", value="memory only", why=why))
    elif best.fits:
        made += advice_rows(_setting(request, best))
    return tuple(made)


def _raised_reason(best: Candidate) -> list[Reason]:
    """Where a Mac lends its GPU more than it does by default."""
    from windlass.core.hardware.devices import catalog
    from windlass.units import MIB

    for slot, held in zip(best.fit.slots, best.fit.memory, strict=True):
        known = catalog().get(slot.device.name)
        if slot.device.kind == "metal" and known is not None and held.total_bytes > known.memory_mib * MIB:
            need = f"sudo sysctl iogpu.wired_limit_mb={-(-held.total_bytes // MIB)}"
            why = "more than the three quarters of memory that Metal lends by default; raise the limit first"
            return [Reason(choice="memory limit", value=need, why=why)]
    return []


def _setting(request: PlanRequest, best: Candidate) -> AdviceInputs:
    devices = [slot.device for slot in best.fit.slots]
    return AdviceInputs(
        engine=best.engine.name,
        engines=request.spec.engines,
        kinds=frozenset(device.kind for device in devices),
        devices=frozenset(device.name for device in devices),
        scheme=best.scheme.name,
        has_experts=request.spec.experts is not None,
        concurrency=best.workload.concurrency,
        num_devices=best.layout.world,
        num_nodes=-(-best.layout.world // request.hardware.devices_per_node),
        is_uniform=len({(device.name, device.memory_bytes) for device in devices}) == 1,
        is_even=_vllm_cuts(request, best),
        spills=bool(best.fit.host_bytes or best.fit.disk_bytes),
        lacking=fused.unsupported(request.spec) or fused.unsupported_storage(best.scheme),
    )


def _vllm_cuts(request: PlanRequest, best: Candidate) -> bool:
    """With this layout, or with expert parallelism added."""
    tp, pp, dp = best.layout.tp, best.layout.pp, best.layout.dp
    for ep in {1, tp * dp if request.spec.experts else 1}:
        try:
            check_layout(engine("vllm"), request.spec, request.rules, best.scheme, Layout(tp=tp, pp=pp, ep=ep, dp=dp))
        except Impossible:
            continue
        return True
    return False


WITHOUT_BF16 = ("V100", "T4", "RTX-20", "TITAN-RTX")
"""Volta and Turing."""


def _engine_reason(request: PlanRequest, best: Candidate) -> Reason:
    kinds = {slot.device.kind for slot in best.fit.slots}
    if request.engine != "auto":
        why = "set with --engine"
    elif not runs_on(best.engine, request):
        return Reason(choice="engine", value="none", why=f"{request.spec.name} can be planned but not run")
    elif "windlass" not in request.spec.engines:
        why = f"the embedded engine does not support {request.spec.family} yet"
    elif best.engine.name == "mlx":
        why = "made for Apple GPUs: the fewest launches per layer; llama.cpp reads more kinds of files"
    elif best.engine.name == "llama.cpp" and (best.fit.host_bytes or best.fit.disk_bytes):
        why = "what does not fit the GPU is computed by the CPU where it lies; ours does that beside Hopper GPUs, vLLM not at all"
    elif best.engine.name == "llama.cpp":
        files = request.stored is not None or request.quant != "auto"
        why = (
            "it runs this model and these files on such devices today"
            if files
            else "for one user the fastest on such a device, by prediction"
        )
    elif best.engine.name == "vllm" and best.layout.world > 1 and best.workload.concurrency <= BATCH_FOR_SERVER:
        why = f"it splits a model over {best.layout.world} GPUs; the embedded engine runs on one so far"
    elif best.engine.name == "vllm" and best.workload.concurrency <= BATCH_FOR_SERVER:
        hopper = all(device_class(slot.device) == "hopper" for slot in best.fit.slots)
        why = (
            f"tuned kernels for {best.scheme.name}; the embedded engine's are for int4 and some families"
            if hopper
            else "tuned kernels for these devices; the embedded engine's were only run on Hopper GPUs and CPUs"
        )
    elif best.engine.name == "vllm":
        why = f"{best.workload.concurrency} concurrent sequences: its kernels and scheduler are optimized for more than {BATCH_FOR_SERVER}"
    elif kinds & {"cpu", "metal"}:
        why = "the embedded engine runs packed weights on a CPU; vLLM is planned on CUDA and ROCm, or on a CPU with --engine vllm"
    elif best.fit.host_bytes or best.fit.disk_bytes:
        why = "weights must be offloaded, and vLLM does not do that"
        if not best.times.offloads or best.layout.world > 1:
            why += "; it is planned for but does not run yet: int4 beside one Hopper GPU does"
    elif not _divides(best):
        why = f"heads are not divisible by tp {best.layout.tp}; the embedded engine can split them unevenly"
    else:
        why = f"embedded, fastest to start; vLLM is better for more than about {BATCH_FOR_SERVER} concurrent sequences"
    return Reason(choice="engine", value=best.engine.name, why=why)


def _divides(best: Candidate) -> bool:
    return best.layout.tp in valid_tp(best.spec, best.layout.tp)


def _scheme_reason(request: PlanRequest, best: Candidate) -> Reason:
    group = f", groups of {best.scheme.group}" if best.scheme.group else ""
    if request.quant != "auto":
        why = "set with --quant"
    elif request.stored is not None:
        why = request.stored_why or "as the files are stored"
    elif best.fit.host_bytes or best.fit.disk_bytes or not best.fits:
        why = "no scheme fits on the devices; the smallest moves the fewest bytes over the slow links"
    elif best.scheme.name == request.spec.native_scheme:
        why = "as published; it fits together with the KV cache"
    elif best.scheme.name == "fp8" and request.goal != "latency":
        why = f"next to no loss, and the devices have units for it; {format_bytes(best.fit.free_bytes)} free on the fullest"
    else:
        why = f"the least lossy that fits together with the KV cache, {format_bytes(best.fit.free_bytes)} free on the fullest device"
    if best.scheme.name == "bf16" and any(slot.device.name.upper().startswith(WITHOUT_BF16) for slot in best.fit.slots):
        why += "; as fp16: these devices have no units for bf16"
    return Reason(choice="quantization", value=f"{best.scheme.name}{group}", why=why)


def _layout_reasons(request: PlanRequest, best: Candidate, placement: Placement) -> list[Reason]:
    made: list[Reason] = []
    for name in ("tp", "pp", "ep", "dp"):
        degree = getattr(best.layout, name)
        if name in request.pins:
            made.append(Reason(choice=name, value=str(degree), why="pinned"))
        elif degree > 1 or name == "tp":
            made.append(Reason(choice=name, value=str(degree), why=_degree_why(name, request, best)))
    made += _imbalance(best, placement)
    replicated = _replicated(best)
    if replicated:
        made.append(Reason(choice="KV heads", value="replicated", why=replicated))
    idle = request.hardware.num_devices - best.layout.world
    if idle:
        why = (
            "at most one replica per sequence; a higher --concurrency would use them"
            if best.layout.dp >= best.workload.concurrency
            else ""
        )
        made.append(Reason(choice="idle devices", value=str(idle), why=why or "no layout that uses them is better for this goal"))
    return made


def _imbalance(best: Candidate, placement: Placement) -> list[Reason]:
    return [*_unlike(best), *_uneven(best, placement)]


def _unlike(best: Candidate) -> list[Reason]:
    """How unequal devices split the model, and the imbalance that remains."""
    made: list[Reason] = []
    if best.fit.shares:
        shown = " / ".join(f"{share:.0%}" for share in best.fit.shares)
        made.append(Reason(choice="shares", value=shown, why="proportional to memory bandwidth, limited by memory size"))
    layers = [stop - start for start, stop in best.fit.stages]
    if max(layers) - min(layers) > 1:
        why = "balanced by bandwidth, limited by memory size"
        made.append(Reason(choice="stages", value=f"{' + '.join(map(str, layers))} layers", why=why))
    if made and best.imbalance > LEAST_IMBALANCE:
        why = f"the slowest device takes {best.imbalance - 1:.0%} longer than the mean"
        made.append(Reason(choice="imbalance", value=f"{best.imbalance:.2f}x", why=why))
    return made


def _uneven(best: Candidate, placement: Placement) -> list[Reason]:
    """Cost of uneven splits: the largest rank's weights over the mean, since decode waits for the rank that reads most."""
    uneven = [made for made in placement.cuts if made.imbalance > 1.001 and made.name is not AxisName.KV_HEADS]
    first = [held.weights_bytes for slot, held in zip(best.fit.slots, best.fit.memory, strict=True) if slot.pp == 0]
    if not uneven or best.fit.shares or not sum(first):
        return []
    worst = max(uneven, key=lambda one: one.imbalance)
    sizes = sorted({stop - start for start, stop in worst.intervals}, reverse=True)
    cost = max(first) * len(first) / sum(first) - 1
    why = f"{worst.count} {worst.name.value} in units of {worst.quantum} over tp {best.layout.tp} are {' or '.join(map(str, sizes))} per rank"
    return [
        Reason(
            choice="imbalance",
            value=f"{worst.imbalance:.2f}x",
            why=f"{why}; the largest rank reads {cost:.1%} more than the mean",
        )
    ]


def _replicated(best: Candidate) -> str:
    mixer = best.spec.attention
    if isinstance(mixer, Attention) and best.layout.tp > mixer.num_kv_heads:
        return (
            f"tp {best.layout.tp} is more than {mixer.num_kv_heads} KV heads, so ranks that share a KV head each keep its cache"
        )
    if not isinstance(mixer, Attention) and best.layout.tp > 1:
        return "the latent (MLA) cache has no heads to split: every tp rank keeps all of it"
    return ""


def _degree_why(name: str, request: PlanRequest, best: Candidate) -> str:
    layout = best.layout
    return {
        "tp": ("it fits on one device" if best.fits and not best.fit.host_bytes and not best.fit.disk_bytes else "one device")
        if layout.tp == 1 and layout.pp == 1
        else "all devices read their part of each layer in parallel"
        if layout.tp > 1
        else "the link between devices is too slow for tp, or one device per stage is enough",
        "pp": f"{layout.pp} stages of consecutive layers: little traffic between stages, and every stage fits",
        "ep": "whole experts per rank: no expert is split, and no traffic besides the all-reduce",
        "dp": f"{layout.dp} replicas use the devices that one replica leaves free",
    }[name]


def _context_reason(request: PlanRequest, best: Candidate) -> Reason:
    kv = max(held.kv_bytes for held in best.fit.memory)
    length = "full" if best.workload.reserve_tokens == best.workload.context_tokens else "mean"
    why = f"{format_bytes(kv)} of {best.scheme.kv} KV cache on the fullest device for a concurrency of {best.workload.concurrency} at {length} length"
    return Reason(choice="context", value=format_context(request.context_tokens), why=why)


def _concurrency_reason(request: PlanRequest, best: Candidate) -> Reason:
    if best.workload.waiting:
        value = f"{best.workload.concurrency:,} of {best.workload.concurrency + best.workload.waiting:,}"
        why = f"as many as memory holds at a mean length of {best.workload.reserve_tokens:,} tokens; {best.workload.waiting:,} wait for their turn"
        return Reason(choice="concurrency", value=value, why=why)
    if request.concurrency is not None:
        short = best.workload.reserve_tokens < best.workload.context_tokens
        why = "set with --concurrency" + (
            f"; not all fit at full length, all at a mean of {best.workload.reserve_tokens:,} tokens" if short else ""
        )
    elif request.goal == "latency":
        why = "one sequence at a time has the lowest latency; --concurrency plans for more"
    else:
        mean = best.workload.reserve_tokens != best.workload.context_tokens
        why = (
            f"as many as fit in the KV cache at a mean length of {best.workload.reserve_tokens:,} tokens"
            if mean
            else "best of those tried"
        )
    return Reason(choice="concurrency", value=str(best.workload.concurrency), why=why)


def _tier_reasons(best: Candidate) -> list[Reason]:
    made: list[Reason] = []
    if best.fit.host_bytes:
        why = (
            "experts are offloaded first: a step reads few of them" if best.spec.experts else "streamed to the devices every step"
        )
        made.append(Reason(choice="host memory", value=format_bytes(best.fit.host_bytes), why=why))
    if best.fit.disk_bytes:
        made.append(
            Reason(choice="disk", value=format_bytes(best.fit.disk_bytes), why="does not fit in host memory; read while running")
        )
    return made + _refused_tiers(best)


def _refused_tiers(best: Candidate) -> list[Reason]:
    """Where our engine does not fit, though there is host memory or a disk: why these do not help."""
    if best.fits or best.engine.name != "windlass" or all(slot.device.kind == "cpu" for slot in best.fit.slots):
        return []
    why = why_not_offloaded(best.times.model, best.fit, best.layout)
    if why:
        return [Reason(choice="host memory", value="not used", why=why)]
    if best.spec.experts is not None:
        return []  # it is used, and too small
    return [
        Reason(
            choice="disk", value="not used", why="beside a GPU only routed experts are kept on disk, and all weights with CPUs"
        )
    ]


def alternative(request: PlanRequest, best: Candidate, other: Candidate) -> Alternative:
    return Alternative(
        layout=other.layout,
        scheme=other.scheme.name,
        engine=other.engine.name,
        decode_tokens_per_second=other.speed.decode_tokens_per_second,
        prefill_tokens_per_second=other.speed.prefill_tokens_per_second,
        free_bytes=other.fit.free_bytes,
        why_not=_why_not(request, best, other),
    )


def _why_not(request: PlanRequest, best: Candidate, other: Candidate) -> str:
    ratio = other.speed.decode_tokens_per_second / max(best.speed.decode_tokens_per_second, 1e-9)
    pace = f"{ratio:.2f}x the tokens/s"
    if other.scheme.name != best.scheme.name:
        return f"{pace}, but lossier" if other.scheme.bits < best.scheme.bits else pace
    return pace
