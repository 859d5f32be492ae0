"""The server status that the web page shows: `GET /windlass/status`, and once a second `/windlass/live`."""

from __future__ import annotations

import time

from windlass.core.model import Frozen
from windlass.core.plan import Plan
from windlass.core.request import Info, Sampling, Stats
from windlass.tasks.serve.backend.models import ModelReport
from windlass.tasks.serve.monitor.metrics import Metrics, kv_cache_usage
from windlass.tasks.serve.monitor.resources import ResourceUsage
from windlass.tasks.serve.service import Service


class LoadProgress(Frozen):
    done_bytes: int
    total_bytes: int


class LiveStats(Frozen):
    running: int
    waiting: int
    tokens_per_second: float
    prompt_tokens_per_second: float
    kv_used: float
    """Fraction of the KV cache used by sequences."""
    kv_total: int
    """Bytes."""
    prefix_hit_rate: float
    ttft_p50: float | None
    """Seconds, over the last minute; null without data."""
    ttft_p95: float | None
    itl_p50: float | None
    itl_p95: float | None


class RequestTotals(Frozen):
    requests: int
    prompt_tokens: int
    completion_tokens: int
    by_outcome: dict[str, int]


class PlanRow(Frozen):
    what: str
    value: str
    reason: str


class PlanSummary(Frozen):
    title: str
    rows: tuple[PlanRow, ...]


class WorkerStatus(Frozen):
    name: str
    address: str
    state: str
    share: float
    """Fraction of the model's weights."""


class Status(Frozen):
    model: str
    context_tokens: int
    engine: str
    state: str
    loading: LoadProgress
    uptime_seconds: float
    device: str
    scheme: str
    kv: str
    now: LiveStats
    totals: RequestTotals
    machine: ResourceUsage
    plan: PlanSummary | None
    workers: tuple[WorkerStatus, ...]
    has_history: bool = False
    """Whether /windlass/history has alerts and the last day."""
    models: tuple[ModelReport, ...] = ()
    """Of a server of several models."""
    swaps: int = 0
    sampling: dict[str, float] = {}
    """What applies to requests that set nothing."""


SHOWN_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_numbers(sampling: Sampling) -> dict[str, float]:
    """Those that are set."""
    found = {name: getattr(sampling, name) for name in SHOWN_SAMPLING}
    return {name: value for name, value in found.items() if value is not None}


def describe_sampling(sampling: Sampling) -> str:
    """`temperature 0.7, top_p 0.95`: what is not neutral."""
    neutral = sampling_numbers(Sampling())
    shown = {
        name: value for name, value in sampling_numbers(sampling).items() if name == "temperature" or neutral.get(name) != value
    }
    return ", ".join(f"{name} {value:g}" for name, value in shown.items())


def status(service: Service) -> Status:
    info = service.supervisor.info
    done, total = service.loading
    return Status(
        model=service.model,
        context_tokens=info.context_tokens if info else 0,
        engine=service.plan.engine if service.plan else "windlass",
        state=service.state,
        loading=LoadProgress(done_bytes=done, total_bytes=total),
        uptime_seconds=round(time.monotonic() - service.started_at, 1),
        device=info.device if info else "",
        scheme=info.scheme if info else "",
        kv=info.kv if info else "",
        now=live_stats(service.metrics, service.stats, info.kv_bytes if info else 0),
        totals=totals(service.metrics),
        machine=service.resources.now(),
        plan=plan_summary(service.plan) if service.plan else engine_summary(info) if info else None,
        workers=_workers(service),
        has_history=service.watch is not None,
        models=service.models.reports() if service.models else (),
        swaps=service.models.swaps if service.models else 0,
        sampling=sampling_numbers(service.settings.sampling),
    )


def _workers(service: Service) -> tuple[WorkerStatus, ...]:
    """The hosts of a distributed client; otherwise this machine."""
    nodes = getattr(service.client, "nodes", ())
    if not nodes:
        return (WorkerStatus(name="this machine", address="local", state=service.supervisor.state, share=1.0),)
    return tuple(
        WorkerStatus(name=node.name, address=node.address, state=node.state, share=round(node.share, 4)) for node in nodes
    )


def live_stats(metrics: Metrics, stats: Stats, kv_bytes: int) -> LiveStats:
    first, between = metrics.recent_first_token, metrics.recent_inter_token
    return LiveStats(
        running=stats.running,
        waiting=stats.waiting,
        tokens_per_second=round(metrics.token_rate.per_second, 2),
        prompt_tokens_per_second=round(metrics.prompt_rate.per_second, 2),
        kv_used=kv_cache_usage(stats),
        kv_total=kv_bytes,
        prefix_hit_rate=stats.prefix_hit_tokens / stats.prefix_query_tokens if stats.prefix_query_tokens else 0.0,
        ttft_p50=first.percentile(0.5),
        ttft_p95=first.percentile(0.95),
        itl_p50=between.percentile(0.5),
        itl_p95=between.percentile(0.95),
    )


def totals(metrics: Metrics) -> RequestTotals:
    return RequestTotals(
        requests=metrics.outcomes.total(),
        prompt_tokens=metrics.total_prompt_tokens,
        completion_tokens=metrics.total_completion_tokens,
        by_outcome=dict(metrics.outcomes),
    )


def engine_summary(info: Info) -> PlanSummary:
    """The engine's own choices, if there is no plan."""
    chosen = (
        ("device", info.device, "available on this machine"),
        ("weights", info.scheme, "as stored in the checkpoint"),
        ("KV", info.kv, "requested, or the default"),
        ("context", f"{info.context_tokens:,} tokens", "requested, or what the model and memory allow"),
        ("sequences", f"{info.max_sequences:,} at once", "requested, or what memory allows"),
    )
    rows = tuple(PlanRow(what=what, value=value, reason=why) for what, value, why in chosen if value)
    return PlanSummary(title=f"{info.model}, without a plan", rows=rows)


def plan_summary(plan: Plan) -> PlanSummary:
    """Without paths, which clients need not know."""
    rows = tuple(PlanRow(what=reason.choice, value=reason.value, reason=reason.why) for reason in plan.reasons)
    return PlanSummary(title=f"{plan.model.name} on {plan.hardware}", rows=rows)
