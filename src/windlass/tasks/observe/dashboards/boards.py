"""The five dashboards: Serve, Fleet and GPUs, Train, Evaluate and route, Energy and cost."""

from __future__ import annotations

from typing import Any

from windlass.core.metrics import node as n
from windlass.core.metrics import serving as s
from windlass.core.metrics import training as t
from windlass.core.metrics.metric import Metric
from windlass.tasks.observe.dashboards.panel import INSTANCES, Board, Panel, Query
from windlass.tasks.observe.rules import node as node_rules
from windlass.tasks.observe.rules import plan as plan_rules
from windlass.tasks.observe.rules import serving as serving_rules
from windlass.tasks.observe.rules import training as training_rules

WINDOW = "$__rate_interval"


def _of(metric: Metric | str, more: str = "") -> str:
    return f"{metric}{{{INSTANCES}{f', {more}' if more else ''}}}"


def _rate(metric: Metric | str, more: str = "") -> str:
    return f"rate({_of(metric, more)}[{WINDOW}])"


def _percentiles(metric: Metric) -> tuple[Query, ...]:
    return tuple(
        Query(expr=f"histogram_quantile({share}, sum by (le) ({_rate(metric.bucket)}))", legend=name)
        for share, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
    )


def _one(title: str, expr: str, unit: str = "short", legend: str = "", **more: Any) -> Panel:
    return Panel(title=title, queries=(Query(expr=expr, legend=legend),), unit=unit, **more)


IDLE = 'mode=~"idle|iowait"'
CPU_BUSY = f"1 - sum by (instance) ({_rate(n.CPU_SECONDS, IDLE)}) / sum by (instance) ({_rate(n.CPU_SECONDS)})"
CORRECT, GRADED = 'verdict="correct"', 'verdict=~"correct|wrong"'
JOULES = f"sum(increase({n.NODE_ENERGY}[1h]))"


SERVE = Board(
    uid="windlass-serve",
    title="Windlass: Serve",
    instances_of=s.ENGINE_UP.name,
    panels=(
        _one("Engine", _of(s.ENGINE_UP), legend="{{instance}}", type="stat", width=4, help="1 while the engine answers."),
        _one("Running", f"sum({_of(s.RUNNING)})", type="stat", width=4),
        _one("Waiting", f"sum({_of(s.WAITING)})", type="stat", width=4),
        _one("KV cache", f"max({_of(s.KV_USAGE)})", "percentunit", type="gauge", width=4, most=1.0),
        _one("Restarts in 24 h", f"sum(increase({_of(s.ENGINE_RESTARTS)}[24h]))", type="stat", width=4),
        _one("Firing alerts", 'count(ALERTS{alertstate="firing", alertname=~"Windlass.*"}) or vector(0)', type="stat", width=4),
        Panel(
            title="Tokens per second",
            queries=(
                Query(expr=f"sum({_rate(s.GENERATION_TOKENS)})", legend="generated"),
                Query(expr=f"sum({_rate(s.PROMPT_TOKENS)})", legend="prompt"),
                Query(expr=f"sum({_rate(s.CACHED_TOKENS)})", legend="of it cached"),
                Query(expr=plan_rules.TOKENS, legend="planned, generated"),
            ),
        ),
        Panel(
            title="Time to first token",
            queries=(*_percentiles(s.TIME_TO_FIRST_TOKEN), Query(expr=plan_rules.FIRST_TOKEN, legend="planned")),
            unit="s",
        ),
        Panel(title="Time between tokens", queries=_percentiles(s.INTER_TOKEN_LATENCY), unit="s"),
        Panel(title="Request latency", queries=_percentiles(s.REQUEST_LATENCY), unit="s"),
        Panel(title="Queue time", queries=_percentiles(s.QUEUE_TIME), unit="s"),
        _one("Requests by outcome", f"sum by (outcome) ({_rate(s.REQUESTS)})", "reqps", "{{outcome}}"),
        Panel(
            title="Requests",
            queries=(
                Query(expr=f"sum({_of(s.RUNNING)})", legend="running"),
                Query(expr=f"sum({_of(s.WAITING)})", legend="waiting"),
                Query(expr=f"sum({_of(s.REQUESTS_IN_FLIGHT)})", legend="in flight"),
            ),
        ),
        _one("KV cache in use", _of(s.KV_USAGE), "percentunit", "{{instance}}", most=1.0),
        _one("Preemptions", f"sum({_rate(s.PREEMPTIONS)})", "cps", "preempted"),
        _one(
            "Prefix cache hits", f"sum({_rate(s.PREFIX_HITS)}) / sum({_rate(s.PREFIX_QUERIES)})", "percentunit", "hits", most=1.0
        ),
        _one("First token, heat map", f"sum by (le) ({_rate(s.TIME_TO_FIRST_TOKEN.bucket)})", "s", "{{le}}", type="heatmap"),
        _one("HTTP by route and status", f"sum by (route, status) ({_rate(s.HTTP_REQUESTS)})", "reqps", "{{route}} {{status}}"),
        Panel(
            title="Slower than the objective",
            queries=(
                Query(expr=serving_rules.slow_share("first_token", "1h"), legend="first token, 1 h"),
                Query(expr=serving_rules.slow_share("between_tokens", "1h"), legend="between tokens, 1 h"),
            ),
            unit="percentunit",
        ),
        _one("Steps", f"sum({_rate(s.ENGINE_STEPS)})", "cps", "steps"),
        _one(
            "Drafts accepted",
            f"{_rate(s.ACCEPTED)} / {_rate(s.DRAFTED)}",
            "percentunit",
            "{{instance}}",
            most=1.0,
            help="Empty without --speculate.",
        ),
        _one(
            "Models loaded", _of(s.MODEL_LOADED), legend="{{model}}", type="state-timeline", help="Of a server of several models."
        ),
        _one("Requests waiting for a model", _of(s.MODEL_WAITING), legend="{{model}}"),
        Panel(
            title="Models loaded and unloaded",
            queries=(
                Query(expr=_rate(s.MODEL_LOADS), legend="{{model}} loaded"),
                Query(expr=_rate(s.MODEL_SWAPS), legend="{{instance}} swaps"),
            ),
            unit="cps",
        ),
        _one(
            "Tokens by key",
            f"sum by (key, kind) ({_rate(s.KEY_TOKENS)})",
            legend="{{key}} {{kind}}",
            help="Empty without named API keys.",
        ),
    ),
)

RANKS = (
    _one("Ranks: computing", f"{serving_rules.COMPUTE}{{{INSTANCES}}}", "percentunit", "rank {{rank}} {{worker}}"),
    _one("Ranks: waiting for others", f"{serving_rules.WAITING}{{{INSTANCES}}}", "percentunit", "rank {{rank}} {{worker}}"),
    _one("Ranks: on the wire", f"{serving_rules.WIRE}{{{INSTANCES}}}", "percentunit", "{{collective}} {{group}}"),
)
"""Of a split model's or a training run's."""

FLEET = Board(
    uid="windlass-fleet",
    title="Windlass: Fleet and GPUs",
    instances_of="up",
    panels=(
        _one("Targets up", f"sum by (job) (up{{{INSTANCES}}})", legend="{{job}}", type="stat"),
        _one("Hosts of split models", _of(s.WORKER_UP), legend="{{worker}}", type="state-timeline"),
        _one("Share of the weights", _of(s.WORKER_SHARE), "percentunit", "{{worker}}", type="bargauge", most=1.0),
        _one("GPU power", f"{node_rules.POWER}{{{INSTANCES}}}", "watt", "{{instance}} {{gpu}}"),
        _one("GPU temperature", f"{node_rules.TEMPERATURE}{{{INSTANCES}}}", "celsius", "{{instance}} {{gpu}}"),
        _one("GPU utilization", f"{node_rules.UTILIZATION}{{{INSTANCES}}}", "percentunit", "{{instance}} {{gpu}}", most=1.0),
        _one("GPU memory", f"{node_rules.MEMORY}{{{INSTANCES}}}", "percentunit", "{{instance}} {{gpu}}", most=1.0),
        _one("SM clock", _of(n.SM_CLOCK), "megahertz", "{{instance}} {{gpu}}"),
        _one(
            "Clocks lowered",
            f"sum by (instance, gpu, reason) ({_rate(n.THROTTLED)})",
            "percentunit",
            "{{instance}} {{gpu}} {{reason}}",
        ),
        _one("NVLink", f"{_rate(n.NVLINK_BYTES)}", "Bps", "{{instance}} {{gpu}}"),
        Panel(
            title="PCIe",
            queries=(
                Query(expr=f"1000 * {_of(n.PCIE_TX)}", legend="{{instance}} {{gpu}} sent"),
                Query(expr=f"1000 * {_of(n.PCIE_RX)}", legend="{{instance}} {{gpu}} received"),
            ),
            unit="Bps",
        ),
        Panel(
            title="GPU faults",
            queries=(
                Query(expr=f"{node_rules.XID}{{{INSTANCES}}}", legend="{{instance}} {{gpu}} last XID"),
                Query(expr=_of(n.ECC_UNCORRECTED), legend="{{instance}} {{gpu}} uncorrected"),
            ),
        ),
        *RANKS,
        Panel(
            title="Ranks: bytes",
            queries=(
                Query(expr=_rate(s.RANK_SENT_BYTES), legend="rank {{rank}} sent"),
                Query(expr=_rate(s.RANK_RECEIVED_BYTES), legend="rank {{rank}} received"),
            ),
            unit="Bps",
        ),
        _one("CPU", CPU_BUSY, "percentunit", "{{instance}}", most=1.0),
        _one("Memory available", f"{_of(n.MEMORY_AVAILABLE)} / {_of(n.MEMORY_TOTAL)}", "percentunit", "{{instance}}", most=1.0),
        _one(
            "Disk left",
            f"{_of(n.FILESYSTEM_AVAIL)} / {_of(n.FILESYSTEM_SIZE)}",
            "percentunit",
            "{{instance}} {{mountpoint}}",
            most=1.0,
        ),
        Panel(
            title="Network",
            queries=(
                Query(expr=f"sum by (instance) ({_rate(n.NETWORK_RECEIVED)})", legend="{{instance}} received"),
                Query(expr=f"sum by (instance) ({_rate(n.NETWORK_SENT)})", legend="{{instance}} sent"),
            ),
            unit="Bps",
        ),
        Panel(
            title="Disk",
            queries=(
                Query(expr=f"sum by (instance) ({_rate(n.DISK_READ)})", legend="{{instance}} read"),
                Query(expr=f"sum by (instance) ({_rate(n.DISK_WRITTEN)})", legend="{{instance}} written"),
            ),
            unit="Bps",
        ),
        Panel(
            title="Weights read from slower tiers",
            queries=(
                Query(expr=_rate(s.OFFLOAD_READ_BYTES), legend="{{instance}} bytes"),
                Query(
                    expr=f"{_rate(s.OFFLOAD_READ_BYTES)} / {_rate(s.OFFLOAD_READ_SECONDS)}", legend="{{instance}} while reading"
                ),
                Query(expr=_rate(s.OFFLOAD_WASTED_BYTES), legend="{{instance}} for wrong guesses"),
            ),
            unit="Bps",
        ),
        Panel(
            title="Experts found in memory, and others that were on their way",
            queries=(
                Query(
                    expr=f"{_rate(s.OFFLOAD_EXPERT_HITS)} / ({_rate(s.OFFLOAD_EXPERT_HITS)} + {_rate(s.OFFLOAD_EXPERT_MISSES)})",
                    legend="{{instance}} in memory",
                ),
                Query(
                    expr=f"{_rate(s.OFFLOAD_EXPERT_FORESEEN)} / {_rate(s.OFFLOAD_EXPERT_MISSES)}",
                    legend="{{instance}} of the others, read ahead",
                ),
                Query(
                    expr=f"{_rate(s.OFFLOAD_EXPERT_READS)} / {_rate(s.OFFLOAD_EXPERT_MISSES)}",
                    legend="{{instance}} of those not on the GPU, from disk",
                ),
            ),
            unit="percentunit",
            most=1.0,
        ),
        _one("Guessed experts a second", _rate(s.OFFLOAD_GUESSES), legend="{{instance}} {{outcome}}"),
        _one("Weights by tier", _of(s.OFFLOAD_BYTES), "bytes", "{{instance}} {{tier}}"),
    ),
)

TRAIN = Board(
    uid="windlass-train",
    title="Windlass: Train",
    instances_of=t.STEPS.name,
    panels=(
        _one("Step", f"{_of(t.STEP)} / {_of(t.PLANNED_STEPS)}", "percentunit", "{{instance}}", type="gauge", width=6, most=1.0),
        _one("Time left", _of(t.SECONDS_LEFT), "s", "{{instance}}", type="stat", width=6),
        _one("Since the last checkpoint", f"time() - {_of(t.LAST_CHECKPOINT)}", "s", "{{instance}}", type="stat", width=6),
        _one("Rollbacks", _of(t.EVENTS, 'kind="rollback"'), legend="{{instance}}", type="stat", width=6),
        Panel(
            title="Loss",
            queries=(
                Query(expr=_of(t.LOSS), legend="{{instance}} training"),
                Query(expr=_of(t.VALIDATION_LOSS), legend="{{instance}} validation"),
            ),
        ),
        _one("Tokens per second", _of(t.TOKEN_RATE), legend="{{instance}}"),
        _one("Model FLOPs utilization", _of(t.MFU), "percentunit", "{{instance}}"),
        _one("Gradient norm", _of(t.GRADIENT_NORM), legend="{{instance}}"),
        _one("Learning rate", _of(t.LEARNING_RATE), legend="{{instance}}"),
        _one("Expert balance (CV)", _of(t.EXPERT_BALANCE), legend="{{instance}}"),
        _one("Step time", _of(t.STEP_SECONDS), "s", "{{instance}}"),
        _one("Steps per minute", f"60 * {_rate(t.STEPS)}", legend="{{instance}}"),
        _one("Events", f"increase({_of(t.EVENTS)}[10m])", legend="{{instance}} {{kind}}"),
        _one("Tokens", _of(t.TOKENS), legend="{{instance}}"),
        *RANKS,
    ),
)

EVALUATE = Board(
    uid="windlass-evaluate",
    title="Windlass: Evaluate and route",
    instances_of=t.EVAL_QUESTIONS.name,
    panels=(
        _one(
            "Done",
            f"sum by (instance) ({_of(t.EVAL_ANSWERED)}) / sum by (instance) ({_of(t.EVAL_QUESTIONS)})",
            "percentunit",
            "{{instance}}",
            type="gauge",
            width=6,
            most=1.0,
        ),
        _one("Time left", _of(t.EVAL_LEFT), "s", "{{instance}}", type="stat", width=6),
        _one("Cost", _of(t.EVAL_COST), "currencyUSD", "{{instance}}", type="stat", width=6),
        _one(
            "Correct",
            f"sum by (instance) ({_of(t.EVAL_ANSWERED, CORRECT)}) / sum by (instance) ({_of(t.EVAL_ANSWERED, GRADED)})",
            "percentunit",
            "{{instance}}",
            type="stat",
            width=6,
        ),
        _one("Answers per second", f"sum by (verdict) ({_rate(t.EVAL_ANSWERED)})", legend="{{verdict}}"),
        _one("Tokens per second", f"sum by (kind) ({_rate(t.EVAL_TOKENS)})", legend="{{kind}}"),
        _one("Router: requests by model", f"sum by (model) ({_rate(t.ROUTE_DECISIONS)})", "reqps", "{{model}}"),
        Panel(
            title="Router: share, and share it was fitted for",
            queries=(
                Query(expr=f"{training_rules.SHARE}{{{INSTANCES}}}", legend="{{model}}"),
                Query(expr=_of(t.ROUTE_EXPECTED_SHARE), legend="{{model}} fitted"),
            ),
            unit="percentunit",
            most=1.0,
        ),
    ),
)

ENERGY = Board(
    uid="windlass-energy",
    title="Windlass: Energy and cost",
    instances_of=n.NODE_ENERGY.name,
    panels=(
        _one("Power", f"sum({node_rules.NODE_POWER}{{{INSTANCES}}})", "watt", type="stat", width=6),
        _one("Energy in 24 h", f"sum(increase({_of(n.NODE_ENERGY)}[24h])) / 3.6e6", "kwatth", type="stat", width=6),
        _one(
            "CO2 equivalent in 24 h (g)",
            f"sum(increase({_of(n.NODE_ENERGY)}[24h])) / 3.6e6 * max(avg_over_time({_of(n.GRID_INTENSITY)}[24h]))",
            type="stat",
            width=6,
            help="Average, location-based intensity of the region given to `windlass observe node`.",
        ),
        _one("Joules per generated token", f"{JOULES} / sum(increase({s.GENERATION_TOKENS}[1h]))", "joule", type="stat", width=6),
        _one("Power by source", f"sum by (instance, source) ({_rate(n.NODE_ENERGY)})", "watt", "{{instance}} {{source}}"),
        _one("Serving: requests, idle, loading", f"sum by (use) ({_rate(n.SERVED_ENERGY)})", "watt", "{{use}}"),
        _one("Power by model", f"sum by (model) ({_rate(n.REQUEST_ENERGY)})", "watt", "{{model}}"),
        _one("GPU power limit", _of(n.GPU_POWER_LIMIT), "watt", "{{instance}} {{gpu}}"),
        Panel(
            title="Budget and plan",
            queries=(
                Query(expr=_of(n.ENERGY_BUDGET), legend="{{instance}} budget"),
                Query(expr=plan_rules.POWER, legend="planned"),
            ),
            unit="watt",
        ),
        _one(
            "Dollars per million generated tokens",
            f"scalar({plan_rules.COST}) / 3600 / sum(rate({s.GENERATION_TOKENS}[1h])) * 1e6",
            "currencyUSD",
            help="At the price of the plan (--plan) and the speed of the last hour.",
        ),
        _one("Grid intensity", _of(n.GRID_INTENSITY), legend="{{region}} g/kWh"),
    ),
)

BOARDS = (SERVE, FLEET, TRAIN, EVALUATE, ENERGY)
