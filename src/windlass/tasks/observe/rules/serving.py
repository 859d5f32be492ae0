"""Rules for servers: objectives as burn rates, queue, cache, errors, the engine, offload, hosts and ranks.

Burn rates with two windows each are of the SRE workbook (sre.google/workbook/alerting-on-slos, tables 5-6 to 5-8): 14.4 times the budget over an hour
uses 2 % of a month's budget.
"""

from __future__ import annotations

from windlass.core.metrics import serving as m
from windlass.core.metrics.metric import Metric
from windlass.tasks.observe.conditions.condition import DAY, HOUR, MINUTE, Binary, Condition, Grouped, Where, latest, over
from windlass.tasks.observe.rules.rule import BY, Alert, Group, Objectives, Recording, Severity, bound_text, page, ticket

WINDOWS = {"5m": 5 * MINUTE, "30m": 30 * MINUTE, "1h": HOUR, "6h": 6 * HOUR, "3d": 3 * DAY}
BURNS: tuple[tuple[str, str, str, float, float, Severity], ...] = (
    ("Fast", "1h", "5m", 14.4, 120, "page"),
    ("Slow", "6h", "30m", 6, 900, "page"),
    ("Steady", "3d", "6h", 1, 3600, "ticket"),
)
"""Name, long window, short window, times the budget, for, severity."""
FAILED = "error|unavailable|late"


def serving_groups(objectives: Objectives) -> tuple[Group, ...]:
    return (
        Group("windlass-slo", recordings=_slow_shares(objectives), alerts=_burns(objectives)),
        Group("windlass-serve", alerts=_serve()),
        Group("windlass-fleet", recordings=_ranks(), alerts=_fleet()),
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
            slow_share(name, window),
            _slower(metric, limit, past),
            f"Share of tokens or requests slower than {limit:g} s over {window}.",
        )
        for name, _, metric, limit in _latencies(objectives)
        for window, past in WINDOWS.items()
    )


def _slower(metric: Metric, limit: float, past: float) -> Condition:
    quick = Grouped("sum", over("rate", metric.bucket, past, Where("le", "=", bound_text(limit))), ("job",))
    return 1 - quick / Grouped("sum", over("rate", metric.count, past), ("job",))


def _burns(objectives: Objectives) -> tuple[Alert, ...]:
    budget = 1 - objectives.good_share
    return tuple(
        Alert(
            name=f"Windlass{title}Burn{speed}",
            condition=_burning(name, long, short, times * budget, objectives.least_requests_an_hour),
            for_seconds=seconds,
            severity=severity,
            summary=f"{{{{ $labels.job }}}}: more than {min(times * budget, 1):.0%} are slower than {limit:g} s "
            f"(objective: {objectives.good_share:.1%})",
            action="Look at queue time and running requests: lower --max-running, add a replica, or find what changed.",
        )
        for name, title, _, limit in _latencies(objectives)
        for speed, long, short, times, seconds, severity in BURNS
    )


def _burning(name: str, long: str, short: str, share: float, least_requests: int) -> Condition:
    most = float(f"{share:.6g}")
    requests = Grouped("sum", over("increase", m.TIME_TO_FIRST_TOKEN.count, HOUR), ("job",))
    is_burning = (latest(slow_share(name, long)) > most).also(latest(slow_share(name, short)) > most)
    return is_burning.also(requests > least_requests)


# --- requests and the engine


def _requests(seconds: float, *where: Where) -> Condition:
    return Grouped("sum", over("increase", m.REQUESTS, seconds, *where), BY)


def _failing() -> Condition:
    """An outage that is over pages nobody, though five minutes still hold it."""
    failed = Where("outcome", "=~", FAILED)
    requests, failures = _requests(5 * MINUTE), _requests(5 * MINUTE, failed)
    is_over = _requests(2 * MINUTE, failed) <= 0.025 * _requests(2 * MINUTE)
    return (failures / requests > 0.05).also(requests > 10).unless(is_over)


def _serve() -> tuple[Alert, ...]:
    full = _requests(5 * MINUTE, Where("outcome", "=", "full"))
    is_waiting = over("min_over_time", m.WAITING, 2 * MINUTE) > 0
    return (
        page(
            "WindlassServerDown",
            latest("up", Where("job", "=", "windlass-serve")).equals(0).lasting(60),
            "{{ $labels.instance }}: the server does not answer",
            "Is the process running? `windlass serve` prints why it ended.",
        ),
        page(
            "WindlassEngineDown",
            latest(m.ENGINE_UP).equals(0).also(latest(m.ENGINE_RESTARTS) > 0).lasting(60),
            "{{ $labels.instance }}: the engine failed and has not come back",
            "The server's log says why the engine ended; memory and XID errors first.",
        ),
        ticket(
            "WindlassEngineRestarted",
            over("increase", m.ENGINE_RESTARTS, 15 * MINUTE) > 0,
            "{{ $labels.instance }}: the engine was restarted",
            "Requests in flight were replayed. The server's log says why it ended.",
        ),
        page(
            "WindlassEngineCrashLoop",
            over("increase", m.ENGINE_RESTARTS, 15 * MINUTE) > 2.5,
            "{{ $labels.instance }}: the engine keeps failing",
            "The server's log says why it ended; a damaged checkpoint or too little memory come back with every start.",
        ),
        page(
            "WindlassErrorRate",
            _failing().lasting(150),
            "{{ $labels.instance }}: {{ $value | humanizePercentage }} of requests fail",
            "`windlass_requests_total` by outcome says how; the server's log says why.",
        ),
        page(
            "WindlassQueueFull",
            (full / _requests(5 * MINUTE) > 0.1).also(full > 5).lasting(60),
            "{{ $labels.instance }}: {{ $value | humanizePercentage }} of requests are refused, the queue is full",
            "Add a replica, raise --max-waiting, or give keys limits of their own.",
        ),
        ticket(
            "WindlassQueueGrowing",
            is_waiting.also(over("deriv", m.WAITING, 5 * MINUTE) > 0).lasting(300),
            "{{ $labels.instance }}: the queue has been growing for minutes",
            "More arrives than is served: add a replica, or limit clients.",
        ),
        ticket(
            "WindlassKvCacheFull",
            (latest(m.KV_USAGE) > 0.95).also(over("increase", m.PREEMPTIONS, 5 * MINUTE) > 0).lasting(300),
            "{{ $labels.instance }}: the KV cache is full and sequences are preempted",
            "Lower --max-running or --context, use --kv fp8, or more memory.",
        ),
        ticket(
            "WindlassPreemptions",
            (over("increase", m.PREEMPTIONS, 10 * MINUTE) > 20).lasting(300),
            "{{ $labels.instance }}: {{ $value | humanize }} preemptions in ten minutes",
            "Their prompts are computed again. Lower --max-running, or give the KV cache more memory.",
        ),
        ticket(
            "WindlassOffloadLinkSaturated",
            (over("rate", m.OFFLOAD_READ_SECONDS, 10 * MINUTE) > 0.9)
            .also(over("rate", m.ENGINE_STEPS, 10 * MINUTE) > 0)
            .lasting(900),
            "{{ $labels.instance }}: weights are being read {{ $value | humanizePercentage }} of the time",
            "The disk or the link sets the speed: more memory for experts, a faster disk, or fewer bits.",
        ),
        ticket(
            "WindlassLogLost",
            over("increase", m.LOG_LINES_LOST, 15 * MINUTE) > 0,
            "{{ $labels.instance }}: log lines could not be written",
            "Is the disk full, or whoever read the log gone?",
        ),
    )


# --- hosts and ranks

WAITING = "windlass:rank_waiting:ratio_rate5m"
WIRE = "windlass:rank_wire:ratio_rate5m"
COMPUTE = "windlass:rank_compute:ratio_rate5m"


def _ranks() -> tuple[Recording, ...]:
    """On the wire is the least that any rank spends in a collective, since the last to arrive does not wait."""
    rank, collective = (*BY, "rank", "worker"), (*BY, "collective", "group")
    spent = over("rate", m.RANK_COLLECTIVE_SECONDS, 5 * MINUTE, Where("collective", "!=", "steps"))
    waited = Binary(spent, "-", latest(WIRE), on=collective, is_many=True)
    computed = Binary(over("rate", m.RANK_STEP_SECONDS, 5 * MINUTE), "-", Grouped("sum", spent, rank), on=rank)
    return (
        Recording(WIRE, Grouped("min", spent, collective), "Share of time on the wire."),
        Recording(WAITING, Grouped("sum", waited, rank), "Share of time that a rank waits for others in collectives."),
        Recording(COMPUTE, computed, "Share of time that a rank computes: its steps without its collectives."),
    )


def _fleet() -> tuple[Alert, ...]:
    others_wait = Grouped("max", latest(WAITING), BY)
    return (
        page(
            "WindlassWorkerLost",
            latest(m.WORKER_UP).equals(0).lasting(30),
            "{{ $labels.worker }} is not connected",
            "The model runs on the others. Is the machine up, is `windlass worker` running there?",
        ),
        ticket(
            "WindlassStraggler",
            Grouped("bottomk", latest(WAITING), BY).also(others_wait > 0.25, on=BY).lasting(600),
            "rank {{ $labels.rank }} on {{ $labels.worker }} is slower than the others, which wait for it",
            "Its temperature, clocks, other programs; or plan again, so that it gets a smaller share.",
        ),
    )
