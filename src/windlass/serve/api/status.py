"""`GET /windlass/status` and, once a second, `/windlass/live`: what the page shows."""

from __future__ import annotations

import time

from windlass.core.model import Frozen
from windlass.core.plan import Plan
from windlass.core.request import Info, Stats
from windlass.serve.monitor.metrics import Metrics, kv_share
from windlass.serve.monitor.resources import MachineNow
from windlass.serve.service import Service


class Loading(Frozen):
    done_bytes: int
    total_bytes: int


class Now(Frozen):
    running: int
    waiting: int
    tokens_per_second: float
    prompt_tokens_per_second: float
    kv_used: float
    """Share of the cache that sequences hold."""
    kv_total: int
    """Bytes."""
    prefix_hit_rate: float
    ttft_p50: float | None
    """Seconds, over the last minute; null where there was none."""
    ttft_p95: float | None
    itl_p50: float | None
    itl_p95: float | None


class Totals(Frozen):
    requests: int
    prompt_tokens: int
    completion_tokens: int
    by_outcome: dict[str, int]


class PlanRow(Frozen):
    what: str
    value: str
    reason: str


class PlanShown(Frozen):
    title: str
    rows: tuple[PlanRow, ...]


class WorkerShown(Frozen):
    name: str
    address: str
    state: str
    share: float
    """Of the model's weights."""


class Status(Frozen):
    model: str
    context_tokens: int
    engine: str
    state: str
    loading: Loading
    uptime_seconds: float
    device: str
    scheme: str
    kv: str
    now: Now
    totals: Totals
    machine: MachineNow
    plan: PlanShown | None
    workers: tuple[WorkerShown, ...]


def status(service: Service) -> Status:
    info = service.supervisor.info
    done, total = service.loading
    return Status(
        model=service.model,
        context_tokens=info.context_tokens if info else 0,
        engine=service.plan.engine if service.plan else "windlass",
        state=service.state,
        loading=Loading(done_bytes=done, total_bytes=total),
        uptime_seconds=round(time.monotonic() - service.started_at, 1),
        device=info.device if info else "",
        scheme=info.scheme if info else "",
        kv=info.kv if info else "",
        now=now(service.metrics, service.stats, info.kv_bytes if info else 0),
        totals=totals(service.metrics),
        machine=service.machine.now(),
        plan=plan_shown(service.plan) if service.plan else chosen_shown(info) if info else None,
        workers=_workers(service),
    )


def _workers(service: Service) -> tuple[WorkerShown, ...]:
    """A client over several machines says which."""
    nodes = getattr(service.client, "nodes", ())
    if not nodes:
        return (WorkerShown(name="this machine", address="local", state=service.supervisor.state, share=1.0),)
    return tuple(
        WorkerShown(name=node.name, address=node.address, state=node.state, share=round(node.share, 4)) for node in nodes
    )


def now(metrics: Metrics, stats: Stats, kv_bytes: int) -> Now:
    first, between = metrics.recent_first_token, metrics.recent_inter_token
    return Now(
        running=stats.running,
        waiting=stats.waiting,
        tokens_per_second=round(metrics.token_rate.per_second, 2),
        prompt_tokens_per_second=round(metrics.prompt_rate.per_second, 2),
        kv_used=kv_share(stats),
        kv_total=kv_bytes,
        prefix_hit_rate=stats.prefix_hit_tokens / stats.prefix_query_tokens if stats.prefix_query_tokens else 0.0,
        ttft_p50=first.percentile(0.5),
        ttft_p95=first.percentile(0.95),
        itl_p50=between.percentile(0.5),
        itl_p95=between.percentile(0.95),
    )


def totals(metrics: Metrics) -> Totals:
    return Totals(
        requests=metrics.outcomes.total(),
        prompt_tokens=metrics.total_prompt_tokens,
        completion_tokens=metrics.total_completion_tokens,
        by_outcome=dict(metrics.outcomes),
    )


def chosen_shown(info: Info) -> PlanShown:
    """Without a plan the engine chooses, as far as memory goes."""
    chosen = (
        ("device", info.device, "what there is"),
        ("weights", info.scheme, "as they are stored"),
        ("KV", info.kv, "asked for, or the default"),
        ("context", f"{info.context_tokens:,} tokens", "asked for, or what the model and the memory have room for"),
        ("sequences", f"{info.max_sequences:,} at once", "asked for, or what the memory has room for"),
    )
    rows = tuple(PlanRow(what=what, value=value, reason=why) for what, value, why in chosen if value)
    return PlanShown(title=f"{info.model}, without a plan", rows=rows)


def plan_shown(plan: Plan) -> PlanShown:
    """No path: where the files lie is nobody's business."""
    rows = tuple(PlanRow(what=reason.choice, value=reason.value, reason=reason.why) for reason in plan.reasons)
    return PlanShown(title=f"{plan.model.name} on {plan.hardware}", rows=rows)
