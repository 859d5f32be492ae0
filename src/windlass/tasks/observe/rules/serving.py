"""Rules for servers: objectives as burn rates, queue, cache, errors, the engine, offload, hosts and ranks.

Burn rates with two windows each are of the SRE workbook (sre.google/workbook/alerting-on-slos, tables 5-6 to 5-8): 14.4 times the budget over an hour
uses 2 % of a month's budget.
"""

from __future__ import annotations

from windlass.core.metrics import serving as m
from windlass.core.metrics.metric import Metric
from windlass.tasks.observe.rules.rule import BY, Alert, Group, Objectives, Recording, Severity, bound_text

WINDOWS = ("5m", "30m", "1h", "6h", "3d")
BURNS: tuple[tuple[str, str, str, float, float, Severity], ...] = (
    ("Fast", "1h", "5m", 14.4, 120, "page"),
    ("Slow", "6h", "30m", 6, 900, "page"),
    ("Steady", "3d", "6h", 1, 3600, "ticket"),
)
"""Name, long window, short window, times the budget, for, severity."""
FAILED = "error|unavailable|late"


def serving_groups(objectives: Objectives) -> tuple[Group, ...]:
    return (
        Group(name="windlass-slo", recordings=_slow_shares(objectives), alerts=_burns(objectives)),
        Group(name="windlass-serve", alerts=_serve()),
        Group(name="windlass-fleet", recordings=_ranks(), alerts=_fleet()),
    )


# --- objectives


def _latencies(objectives: Objectives) -> tuple[tuple[str, str, Metric, float], ...]:
    return (
        ("first_token", "FirstToken", m.TIME_TO_FIRST_TOKEN, objectives.first_token_seconds),
        ("between_tokens", "BetweenTokens", m.INTER_TOKEN_LATENCY, objectives.between_tokens_seconds),
    )


def slow_share(name: str, window: str) -> str:
    return f"windlass:slow_{name}:ratio_rate{window}"


def _slow_shares(objectives: Objectives) -> tuple[Recording, ...]:
    return tuple(
        Recording(
            name=slow_share(name, window),
            expr=f'1 - sum by (job) (rate({metric.bucket}{{le="{bound_text(seconds)}"}}[{window}])) '
            f"/ sum by (job) (rate({metric.count}[{window}]))",
            help=f"Share of tokens or requests slower than {seconds:g} s over {window}.",
        )
        for name, _, metric, seconds in _latencies(objectives)
        for window in WINDOWS
    )


def _burns(objectives: Objectives) -> tuple[Alert, ...]:
    budget = 1 - objectives.good_share
    return tuple(
        Alert(
            name=f"Windlass{title}Burn{speed}",
            expr=f"{slow_share(name, long)} > {times * budget:.6g} and {slow_share(name, short)} > {times * budget:.6g} "
            f"and sum by (job) (increase({m.TIME_TO_FIRST_TOKEN.count}[1h])) > {objectives.least_requests_an_hour}",
            for_seconds=seconds,
            severity=severity,
            summary=f"{{{{ $labels.job }}}}: more than {min(times * budget, 1):.0%} are slower than {limit:g} s "
            f"(objective: {objectives.good_share:.1%})",
            action="Look at queue time and running requests: lower --max-running, add a replica, or find what changed.",
        )
        for name, title, _, limit in _latencies(objectives)
        for speed, long, short, times, seconds, severity in BURNS
    )


# --- requests and the engine


def _serve() -> tuple[Alert, ...]:
    requests = f"sum by ({BY}) (increase({m.REQUESTS}[5m]))"
    failed = f'sum by ({BY}) (increase({m.REQUESTS}{{outcome=~"{FAILED}"}}[5m]))'
    # An outage that is over pages nobody, though five minutes still hold it.
    is_over = (
        f'sum by ({BY}) (increase({m.REQUESTS}{{outcome=~"{FAILED}"}}[2m])) <= 0.025 * sum by ({BY}) (increase({m.REQUESTS}[2m]))'
    )
    full = f'sum by ({BY}) (increase({m.REQUESTS}{{outcome="full"}}[5m]))'
    return (
        Alert(
            name="WindlassServerDown",
            expr='up{job="windlass-serve"} == 0',
            for_seconds=60,
            severity="page",
            summary="{{ $labels.instance }}: the server does not answer",
            action="Is the process running? `windlass serve` prints why it ended.",
        ),
        Alert(
            name="WindlassEngineDown",
            expr=f"{m.ENGINE_UP} == 0 and {m.ENGINE_RESTARTS} > 0",
            for_seconds=60,
            severity="page",
            summary="{{ $labels.instance }}: the engine failed and has not come back",
            action="The server's log says why the engine ended; memory and XID errors first.",
        ),
        Alert(
            name="WindlassEngineRestarted",
            expr=f"increase({m.ENGINE_RESTARTS}[15m]) > 0",
            for_seconds=0,
            severity="ticket",
            summary="{{ $labels.instance }}: the engine was restarted",
            action="Requests in flight were replayed. The server's log says why it ended.",
        ),
        Alert(
            name="WindlassEngineCrashLoop",
            expr=f"increase({m.ENGINE_RESTARTS}[15m]) > 2.5",
            for_seconds=0,
            severity="page",
            summary="{{ $labels.instance }}: the engine keeps failing",
            action="The server's log says why it ended; a damaged checkpoint or too little memory come back with every start.",
        ),
        Alert(
            name="WindlassErrorRate",
            expr=f"({failed} / {requests} > 0.05 and {requests} > 10) unless {is_over}",
            for_seconds=150,
            severity="page",
            summary="{{ $labels.instance }}: {{ $value | humanizePercentage }} of requests fail",
            action="`windlass_requests_total` by outcome says how; the server's log says why.",
        ),
        Alert(
            name="WindlassQueueFull",
            expr=f"{full} / {requests} > 0.1 and {full} > 5",
            for_seconds=60,
            severity="page",
            summary="{{ $labels.instance }}: {{ $value | humanizePercentage }} of requests are refused, the queue is full",
            action="Add a replica, raise --max-waiting, or give keys limits of their own.",
        ),
        Alert(
            name="WindlassQueueGrowing",
            expr=f"min_over_time({m.WAITING}[2m]) > 0 and deriv({m.WAITING}[5m]) > 0",
            for_seconds=300,
            severity="ticket",
            summary="{{ $labels.instance }}: the queue has been growing for minutes",
            action="More arrives than is served: add a replica, or limit clients.",
        ),
        Alert(
            name="WindlassKvCacheFull",
            expr=f"{m.KV_USAGE} > 0.95 and increase({m.PREEMPTIONS}[5m]) > 0",
            for_seconds=300,
            severity="ticket",
            summary="{{ $labels.instance }}: the KV cache is full and sequences are preempted",
            action="Lower --max-running or --context, use --kv fp8, or more memory.",
        ),
        Alert(
            name="WindlassPreemptions",
            expr=f"increase({m.PREEMPTIONS}[10m]) > 20",
            for_seconds=300,
            severity="ticket",
            summary="{{ $labels.instance }}: {{ $value | humanize }} preemptions in ten minutes",
            action="Their prompts are computed again. Lower --max-running, or give the KV cache more memory.",
        ),
        Alert(
            name="WindlassOffloadLinkSaturated",
            expr=f"rate({m.OFFLOAD_READ_SECONDS}[10m]) > 0.9 and rate({m.ENGINE_STEPS}[10m]) > 0",
            for_seconds=900,
            severity="ticket",
            summary="{{ $labels.instance }}: weights are being read {{ $value | humanizePercentage }} of the time",
            action="The disk or the link sets the speed: more memory for experts, a faster disk, or fewer bits.",
        ),
        Alert(
            name="WindlassLogLost",
            expr=f"increase({m.LOG_LINES_LOST}[15m]) > 0",
            for_seconds=0,
            severity="ticket",
            summary="{{ $labels.instance }}: log lines could not be written",
            action="Is the disk full, or whoever read the log gone?",
        ),
    )


# --- hosts and ranks

WAITING = "windlass:rank_waiting:ratio_rate5m"
WIRE = "windlass:rank_wire:ratio_rate5m"
COMPUTE = "windlass:rank_compute:ratio_rate5m"


def _ranks() -> tuple[Recording, ...]:
    spent = f'rate({m.RANK_COLLECTIVE_SECONDS}{{collective!="steps"}}[5m])'
    return (
        Recording(
            name=WIRE,
            expr=f"min by ({BY}, collective, group) ({spent})",
            help="Share of time on the wire: the least that any rank spends in a collective, since the last to arrive does not wait.",
        ),
        Recording(
            name=WAITING,
            expr=f"sum by ({BY}, rank, worker) ({spent} - on ({BY}, collective, group) group_left () {WIRE})",
            help="Share of time that a rank waits for others in collectives.",
        ),
        Recording(
            name=COMPUTE,
            expr=f"rate({m.RANK_STEP_SECONDS}[5m]) - on ({BY}, rank, worker) sum by ({BY}, rank, worker) ({spent})",
            help="Share of time that a rank computes: its steps without its collectives.",
        ),
    )


def _fleet() -> tuple[Alert, ...]:
    return (
        Alert(
            name="WindlassWorkerLost",
            expr=f"{m.WORKER_UP} == 0",
            for_seconds=30,
            severity="page",
            summary="{{ $labels.worker }} is not connected",
            action="The model runs on the others. Is the machine up, is `windlass worker` running there?",
        ),
        Alert(
            name="WindlassStraggler",
            expr=f"bottomk by ({BY}) (1, {WAITING}) and on ({BY}) max by ({BY}) ({WAITING}) > 0.25",
            for_seconds=600,
            severity="ticket",
            summary="rank {{ $labels.rank }} on {{ $labels.worker }} is slower than the others, which wait for it",
            action="Its temperature, clocks, other programs; or plan again, so that it gets a smaller share.",
        ),
    )
