"""Why each choice was made, in a sentence with numbers: value and reason travel together."""

from __future__ import annotations

from windlass.core import fused
from windlass.core.layout import Layout
from windlass.core.model import Attention
from windlass.core.place import Placement
from windlass.core.plan import Alternative, Reason
from windlass.core.rule import AxisName
from windlass.errors import Impossible
from windlass.plan.engines import ENGINES
from windlass.plan.inference.advice import BATCH_FOR_SERVER, AdviceInputs, advice_rows
from windlass.plan.inference.candidates import Candidate
from windlass.plan.inference.feasible import check_layout, valid_tp
from windlass.plan.inference.search import PlanRequest, SearchResult, runs_on
from windlass.units import format_bytes, format_context

LEAST_IMBALANCE = 1.005
"""That is worth a word."""


def reasons_for(question: PlanRequest, answer: SearchResult, placement: Placement) -> tuple[Reason, ...]:
    best = answer.best
    made = [
        _engine_reason(question, best),
        _scheme_reason(question, best),
        *_layout_reasons(question, best, placement),
        _context_reason(question, best),
        _concurrency_reason(question, best),
    ]
    made += _tier_reasons(best)
    if not runs_on(best.engine, question):
        why = f"no engine here runs {question.spec.name} on these devices; its memory is planned all the same"
        made.append(Reason(choice="scope", value="memory only", why=why))
    elif best.fits:
        made += advice_rows(_setting(question, best))
    return tuple(made)


def _setting(question: PlanRequest, best: Candidate) -> AdviceInputs:
    devices = [seat.device for seat in best.fit.seats]
    return AdviceInputs(
        engine=best.engine.name,
        engines=question.spec.engines,
        kinds=frozenset(device.kind for device in devices),
        devices=frozenset(device.name for device in devices),
        scheme=best.scheme.name,
        has_experts=question.spec.experts is not None,
        concurrency=best.workload.concurrency,
        num_devices=best.layout.world,
        num_nodes=-(-best.layout.world // question.hardware.devices_per_node),
        is_uniform=len({(device.name, device.memory_bytes) for device in devices}) == 1,
        is_even=_vllm_cuts(question, best),
        spills=bool(best.fit.host_bytes or best.fit.disk_bytes),
        lacking=fused.lacks(question.spec) or fused.storage_lacks(best.scheme),
    )


def _vllm_cuts(question: PlanRequest, best: Candidate) -> bool:
    """So, or with whole experts a rank."""
    tp, pp, dp = best.layout.tp, best.layout.pp, best.layout.dp
    for ep in {1, tp * dp if question.spec.experts else 1}:
        try:
            check_layout(ENGINES["vllm"], question.spec, question.rules, best.scheme, Layout(tp=tp, pp=pp, ep=ep, dp=dp))
        except Impossible:
            continue
        return True
    return False


def _engine_reason(question: PlanRequest, best: Candidate) -> Reason:
    kinds = {seat.device.kind for seat in best.fit.seats}
    if question.engine != "auto":
        why = "asked for"
    elif not runs_on(best.engine, question):
        return Reason(choice="engine", value="none", why=f"{question.spec.name} is described for planning only")
    elif "windlass" not in question.spec.engines:
        why = f"the embedded engine does not run {question.spec.family} yet"
    elif best.engine.name == "vllm":
        why = f"{best.workload.concurrency} sequences at once: its batched kernels and scheduler are made for more than {BATCH_FOR_SERVER}"
    elif kinds & {"cpu", "metal"}:
        why = "the embedded engine runs here, 4-bit weights too; vLLM is planned for CUDA and ROCm, and for a CPU where asked for"
    elif best.fit.host_bytes or best.fit.disk_bytes:
        why = "weights must be kept outside the devices, which the embedded engine streams"
    elif not _divides(best):
        why = f"heads do not divide by tp {best.layout.tp}, which the embedded engine may split unevenly"
    else:
        why = f"embedded, quickest to start; vLLM is the better engine beyond about {BATCH_FOR_SERVER} sequences at once"
    return Reason(choice="engine", value=best.engine.name, why=why)


def _divides(best: Candidate) -> bool:
    return best.layout.tp in valid_tp(best.spec, best.layout.tp)


def _scheme_reason(question: PlanRequest, best: Candidate) -> Reason:
    group = f", groups of {best.scheme.group}" if best.scheme.group else ""
    if question.quant != "auto":
        why = "asked for"
    elif best.fit.host_bytes or best.fit.disk_bytes or not best.fits:
        why = "no scheme fits the devices; the smallest moves the fewest bytes over the slow links"
    elif best.scheme.name == question.spec.native_scheme:
        why = "as published, and it fits with the cache"
    else:
        why = f"the least lossy that fits with the cache, {format_bytes(best.fit.free_bytes)} to spare on the fullest device"
    return Reason(choice="quantization", value=f"{best.scheme.name}{group}", why=why)


def _layout_reasons(question: PlanRequest, best: Candidate, placement: Placement) -> list[Reason]:
    made: list[Reason] = []
    for name in ("tp", "pp", "ep", "dp"):
        degree = getattr(best.layout, name)
        if name in question.pins:
            made.append(Reason(choice=name, value=str(degree), why="pinned"))
        elif degree > 1 or name == "tp":
            made.append(Reason(choice=name, value=str(degree), why=_degree_why(name, question, best)))
    made += _imbalance(best, placement)
    replicated = _replicated(best)
    if replicated:
        made.append(Reason(choice="KV heads", value="replicated", why=replicated))
    idle = question.hardware.num_devices - best.layout.world
    if idle:
        why = (
            "one copy per sequence at most: more sequences (--concurrency) would use them"
            if best.layout.dp >= best.workload.concurrency
            else ""
        )
        made.append(Reason(choice="idle devices", value=str(idle), why=why or "no layout that uses them is better for this goal"))
    return made


def _imbalance(best: Candidate, placement: Placement) -> list[Reason]:
    return [*_unlike(best), *_uneven(best, placement)]


def _unlike(best: Candidate) -> list[Reason]:
    """How devices that differ share the work, and what is lost when they cannot be given what they are worth."""
    made: list[Reason] = []
    if best.fit.shares:
        shown = " / ".join(f"{share:.0%}" for share in best.fit.shares)
        made.append(Reason(choice="shares", value=shown, why="as quickly as each reads its memory, as far as it has room"))
    layers = [stop - start for start, stop in best.fit.stages]
    if max(layers) - min(layers) > 1:
        why = "the slowest stage is as quick as can be, and none overflows"
        made.append(Reason(choice="stages", value=f"{' + '.join(map(str, layers))} layers", why=why))
    if made and best.imbalance > LEAST_IMBALANCE:
        why = f"the device that takes longest for its part takes {best.imbalance - 1:.0%} longer than the mean"
        made.append(Reason(choice="imbalance", value=f"{best.imbalance:.2f}x", why=why))
    return made


def _uneven(best: Candidate, placement: Placement) -> list[Reason]:
    """What uneven cuts cost: the fullest rank's weights over the mean, since decode waits for whoever reads most."""
    uneven = [made for made in placement.cuts if made.imbalance > 1.001 and made.name is not AxisName.KV_HEADS]
    first = [held.weights_bytes for seat, held in zip(best.fit.seats, best.fit.memory, strict=True) if seat.pp == 0]
    if not uneven or best.fit.shares or not sum(first):
        return []
    worst = max(uneven, key=lambda one: one.imbalance)
    sizes = sorted({stop - start for start, stop in worst.intervals}, reverse=True)
    cost = max(first) * len(first) / sum(first) - 1
    why = f"{worst.count} {worst.name.value} in pieces of {worst.quantum} over tp {best.layout.tp} give {' or '.join(map(str, sizes))} a rank"
    return [
        Reason(
            choice="imbalance",
            value=f"{worst.imbalance:.2f}x",
            why=f"{why}; the fullest rank reads {cost:.1%} more than the mean",
        )
    ]


def _replicated(best: Candidate) -> str:
    mixer = best.spec.attention
    if isinstance(mixer, Attention) and best.layout.tp > mixer.num_kv_heads:
        return f"tp {best.layout.tp} is more than {mixer.num_kv_heads} KV heads, so ranks that share one each keep its cache"
    if not isinstance(mixer, Attention) and best.layout.tp > 1:
        return "the latent has no heads to split: every tp rank keeps the whole cache"
    return ""


def _degree_why(name: str, question: PlanRequest, best: Candidate) -> str:
    layout = best.layout
    return {
        "tp": (
            "one device has room for it" if best.fits and not best.fit.host_bytes and not best.fit.disk_bytes else "one device"
        )
        if layout.tp == 1 and layout.pp == 1
        else "every device reads its part of every layer at once"
        if layout.tp > 1
        else "the link between devices is too slow, or one device per stage suffices",
        "pp": f"{layout.pp} stages of consecutive layers: little traffic between them, and no stage overflows",
        "ep": "whole experts per rank: no expert is cut, and no extra traffic beside the all-reduce",
        "dp": f"{layout.dp} replicas use the devices that one copy leaves",
    }[name]


def _context_reason(question: PlanRequest, best: Candidate) -> Reason:
    kv = max(held.kv_bytes for held in best.fit.memory)
    length = "full" if best.workload.reserve_tokens == best.workload.context_tokens else "mean"
    why = f"{format_bytes(kv)} of {best.scheme.kv} cache on the fullest device for {best.workload.concurrency} at {length} length"
    return Reason(choice="context", value=format_context(question.context_tokens), why=why)


def _concurrency_reason(question: PlanRequest, best: Candidate) -> Reason:
    if question.concurrency is not None:
        why = "asked for"
    elif question.goal == "latency":
        why = "one sequence at a time answers soonest; --concurrency plans for more"
    else:
        mean = best.workload.reserve_tokens != best.workload.context_tokens
        why = (
            f"as many as the cache holds at their mean length of {best.workload.reserve_tokens:,} tokens"
            if mean
            else "best of those tried"
        )
    return Reason(choice="concurrency", value=str(best.workload.concurrency), why=why)


def _tier_reasons(best: Candidate) -> list[Reason]:
    made: list[Reason] = []
    if best.fit.host_bytes:
        why = (
            "experts leave the devices first: a step reads few of them"
            if best.spec.experts
            else "streamed to the devices every step"
        )
        made.append(Reason(choice="host memory", value=format_bytes(best.fit.host_bytes), why=why))
    if best.fit.disk_bytes:
        made.append(Reason(choice="disk", value=format_bytes(best.fit.disk_bytes), why="beyond host memory; read while running"))
    return made


def alternative(question: PlanRequest, best: Candidate, other: Candidate) -> Alternative:
    return Alternative(
        layout=other.layout,
        scheme=other.scheme.name,
        engine=other.engine.name,
        decode_tokens_per_second=other.speed.decode_tokens_per_second,
        prefill_tokens_per_second=other.speed.prefill_tokens_per_second,
        free_bytes=other.fit.free_bytes,
        why_not=_why_not(question, best, other),
    )


def _why_not(question: PlanRequest, best: Candidate, other: Candidate) -> str:
    ratio = other.speed.decode_tokens_per_second / max(best.speed.decode_tokens_per_second, 1e-9)
    pace = f"{ratio:.2f}x the tokens/s"
    if other.scheme.name != best.scheme.name:
        return f"{pace}, but lossier" if other.scheme.bits < best.scheme.bits else pace
    return pace
