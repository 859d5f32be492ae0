"""Rules for training runs, and for a router."""

from __future__ import annotations

from windlass.core.metrics import training as m
from windlass.tasks.observe.rules.rule import BY, Alert, Group, Recording

SHARE = "windlass:route_share:ratio_rate1h"


def training_groups() -> tuple[Group, ...]:
    return Group(name="windlass-train", alerts=_train()), Group(name="windlass-route", recordings=_shares(), alerts=_route())


def _stalled() -> str:
    """The window is at least three times the slowest step; before the first step nothing is known."""
    quick = f"changes({m.STEPS}[10m]) == 0 and {m.STEP_SECONDS} <= 200"
    slow = f"changes({m.STEPS}[2h]) == 0 and {m.STEP_SECONDS} > 200"
    return f"(({quick}) or ({slow})) and {m.STEPS} > 0 and count_over_time({m.STEPS}[10m] offset 10m) > 0"


def _train() -> tuple[Alert, ...]:
    return (
        Alert(
            name="WindlassTrainingDown",
            expr='up{job="windlass-train"} == 0',
            for_seconds=120,
            severity="page",
            summary="{{ $labels.instance }}: the run does not answer",
            action="Did it end? `windlass train run --resume` continues from the last checkpoint.",
        ),
        Alert(
            name="WindlassTrainingStalled",
            expr=_stalled(),
            for_seconds=0,
            severity="page",
            summary="{{ $labels.instance }}: no step for ten minutes, while the process answers",
            action="A rank hangs in a collective, or the disk does. Look at the ranks' stacks, then stop and resume.",
        ),
        Alert(
            name="WindlassLossNaN",
            expr=f'{m.LOSS} != {m.LOSS} or on ({BY}) increase({m.EVENTS}{{kind="not_finite"}}[10m]) > 0',
            for_seconds=0,
            severity="page",
            summary="{{ $labels.instance }}: the loss is not a number",
            action="The loss guard rolls back and skips the samples; if it comes back, lower the learning rate or look at the data.",
        ),
        Alert(
            name="WindlassRollbacks",
            expr=f'increase({m.EVENTS}{{kind="rollback"}}[30m]) > 2.5',
            for_seconds=0,
            severity="page",
            summary="{{ $labels.instance }}: {{ $value | humanize }} rollbacks in half an hour",
            action="Lower optimizer.lr, lengthen the warm-up, or look at the data of those steps.",
        ),
        Alert(
            name="WindlassLossSpike",
            expr=f"avg_over_time({m.LOSS}[2m]) > 1.5 * avg_over_time({m.LOSS}[1h] offset 10m) and {m.STEP} > 100",
            for_seconds=300,
            severity="ticket",
            summary="{{ $labels.instance }}: the loss is {{ $value | humanize }}, half again what it was",
            action="Data of another kind, a learning rate too high, or damaged weights after a restart.",
        ),
        Alert(
            name="WindlassThroughputDropped",
            expr=f"avg_over_time({m.TOKEN_RATE}[10m]) < 0.8 * quantile_over_time(0.5, {m.TOKEN_RATE}[6h]) "
            f"and count_over_time({m.TOKEN_RATE}[1h] offset 10m) > 0",
            for_seconds=900,
            severity="ticket",
            summary="{{ $labels.instance }}: {{ $value | humanize }} tokens/s, a fifth below its own median",
            action="A hot or throttled GPU, a slow disk, a straggler: `windlass top` shows which.",
        ),
        Alert(
            name="WindlassExpertsUneven",
            expr=f"avg_over_time({m.EXPERT_BALANCE}[30m]) > 1 and {m.STEP} > 100",
            for_seconds=1800,
            severity="ticket",
            summary="{{ $labels.instance }}: experts get very uneven numbers of tokens (CV {{ $value | humanize }})",
            action="Raise the balance coefficient, or see whether the router's biases still move.",
        ),
        Alert(
            name="WindlassCheckpointOverdue",
            expr=f"time() - {m.LAST_CHECKPOINT} > clamp_min(3 * {m.CHECKPOINT_INTERVAL}, 7200)",
            for_seconds=0,
            severity="page",
            summary="{{ $labels.instance }}: no checkpoint for {{ $value | humanizeDuration }}",
            action="Is the disk full or slow? A crash now loses all of that.",
        ),
        Alert(
            name="WindlassCheckpointFailed",
            expr=f'increase({m.EVENTS}{{kind="checkpoint_failed"}}[30m]) > 0',
            for_seconds=0,
            severity="page",
            summary="{{ $labels.instance }}: a checkpoint could not be written",
            action="The run goes on. Free space on its disk.",
        ),
    )


def _shares() -> tuple[Recording, ...]:
    decisions = f"rate({m.ROUTE_DECISIONS}[1h])"
    return (
        Recording(
            name=SHARE,
            expr=f"sum by ({BY}, model) ({decisions}) / on ({BY}) group_left () sum by ({BY}) ({decisions})",
            help="Share of requests that a model gets.",
        ),
    )


def _route() -> tuple[Alert, ...]:
    return (
        Alert(
            name="WindlassRouterDrift",
            expr=f"abs({SHARE} - on ({BY}, model) {m.ROUTE_EXPECTED_SHARE}) > 0.15 "
            f"and on ({BY}) sum by ({BY}) (increase({m.ROUTE_DECISIONS}[1h])) > 100",
            for_seconds=1800,
            severity="ticket",
            summary="{{ $labels.model }} gets another share of requests than it was fitted for",
            action="Prompts have changed. Fit the router again on recent ones.",
        ),
    )
