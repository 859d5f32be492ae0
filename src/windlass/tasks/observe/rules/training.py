"""Rules for training runs, and for a router."""

from __future__ import annotations

from windlass.core.metrics import training as m
from windlass.tasks.observe.conditions.condition import HOUR, MINUTE, Binary, Condition, Grouped, Mapped, Now, Where, latest, over
from windlass.tasks.observe.rules.rule import BY, Alert, Group, Recording, page, ticket

SHARE = "windlass:route_share:ratio_rate1h"


def training_groups() -> tuple[Group, ...]:
    return Group("windlass-train", alerts=_train()), Group("windlass-route", recordings=_shares(), alerts=_route())


def _stalled() -> Condition:
    """The window is at least three times the slowest step; before the first step nothing is known."""
    quick = over("changes", m.STEPS, 10 * MINUTE).equals(0).also(latest(m.STEP_SECONDS) <= 200)
    slow = over("changes", m.STEPS, 2 * HOUR).equals(0).also(latest(m.STEP_SECONDS) > 200)
    had_steps = over("count_over_time", m.STEPS, 10 * MINUTE, ago=10 * MINUTE) > 0
    return quick.or_else(slow).also(latest(m.STEPS) > 0).also(had_steps)


def _slower() -> Condition:
    median = over("quantile_over_time", m.TOKEN_RATE, 6 * HOUR, parameter=0.5)
    was_there = over("count_over_time", m.TOKEN_RATE, HOUR, ago=10 * MINUTE) > 0
    return (over("avg_over_time", m.TOKEN_RATE, 10 * MINUTE) < 0.8 * median).also(was_there)


def _events(kind: str, seconds: float) -> Condition:
    return over("increase", m.EVENTS, seconds, Where("kind", "=", kind))


def _train() -> tuple[Alert, ...]:
    loss_before = over("avg_over_time", m.LOSS, HOUR, ago=10 * MINUTE)
    is_warm = latest(m.STEP) > 100
    return (
        page(
            "WindlassTrainingDown",
            latest("up", Where("job", "=", "windlass-train")).equals(0).lasting(120),
            "{{ $labels.instance }}: the run does not answer",
            "Did it end? `windlass train run --resume` continues from the last checkpoint.",
        ),
        page(
            "WindlassTrainingStalled",
            _stalled(),
            "{{ $labels.instance }}: no step for ten minutes, while the process answers",
            "A rank hangs in a collective, or the disk does. Look at the ranks' stacks, then stop and resume.",
        ),
        page(
            "WindlassLossNaN",
            Binary(latest(m.LOSS), "!=", latest(m.LOSS)).or_else(_events("not_finite", 10 * MINUTE) > 0, on=BY),
            "{{ $labels.instance }}: the loss is not a number",
            "The loss guard rolls back and skips the samples; if it comes back, lower the learning rate or look at the data.",
        ),
        page(
            "WindlassRollbacks",
            _events("rollback", 30 * MINUTE) > 2.5,
            "{{ $labels.instance }}: {{ $value | humanize }} rollbacks in half an hour",
            "Lower optimizer.lr, lengthen the warm-up, or look at the data of those steps.",
        ),
        ticket(
            "WindlassLossSpike",
            (over("avg_over_time", m.LOSS, 2 * MINUTE) > 1.5 * loss_before).also(is_warm).lasting(300),
            "{{ $labels.instance }}: the loss is {{ $value | humanize }}, half again what it was",
            "Data of another kind, a learning rate too high, or damaged weights after a restart.",
        ),
        ticket(
            "WindlassThroughputDropped",
            _slower().lasting(900),
            "{{ $labels.instance }}: {{ $value | humanize }} tokens/s, a fifth below its own median",
            "A hot or throttled GPU, a slow disk, a straggler: `windlass top` shows which.",
        ),
        ticket(
            "WindlassExpertsUneven",
            (over("avg_over_time", m.EXPERT_BALANCE, 30 * MINUTE) > 1).also(is_warm).lasting(1800),
            "{{ $labels.instance }}: experts get very uneven numbers of tokens (CV {{ $value | humanize }})",
            "Raise the balance coefficient, or see whether the router's biases still move.",
        ),
        page(
            "WindlassCheckpointOverdue",
            Now() - latest(m.LAST_CHECKPOINT) > Mapped("clamp_min", 3 * latest(m.CHECKPOINT_INTERVAL), 7200),
            "{{ $labels.instance }}: no checkpoint for {{ $value | humanizeDuration }}",
            "Is the disk full or slow? A crash now loses all of that.",
        ),
        page(
            "WindlassCheckpointFailed",
            _events("checkpoint_failed", 30 * MINUTE) > 0,
            "{{ $labels.instance }}: a checkpoint could not be written",
            "The run goes on. Free space on its disk.",
        ),
    )


def _shares() -> tuple[Recording, ...]:
    decisions = over("rate", m.ROUTE_DECISIONS, HOUR)
    of_all = Binary(Grouped("sum", decisions, (*BY, "model")), "/", Grouped("sum", decisions, BY), on=BY, is_many=True)
    return (Recording(SHARE, of_all, "Share of requests that a model gets."),)


def _route() -> tuple[Alert, ...]:
    difference = Binary(latest(SHARE), "-", latest(m.ROUTE_EXPECTED_SHARE), on=(*BY, "model"))
    has_many = Grouped("sum", over("increase", m.ROUTE_DECISIONS, HOUR), BY) > 100
    return (
        ticket(
            "WindlassRouterDrift",
            (Mapped("abs", difference) > 0.15).also(has_many, on=BY).lasting(1800),
            "{{ $labels.model }} gets another share of requests than it was fitted for",
            "Prompts have changed. Fit the router again on recent ones.",
        ),
    )
