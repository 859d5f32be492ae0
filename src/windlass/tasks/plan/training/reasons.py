"""The reasons of a training plan: why each value was chosen, with numbers."""

from __future__ import annotations

from collections.abc import Iterator

from windlass.core.hardware.spec import Hardware
from windlass.core.model import ModelSpec
from windlass.core.plan import Reason
from windlass.core.recipe.recipe import Recipe
from windlass.tasks.plan.training.checkpoint import CheckpointPlan
from windlass.tasks.plan.training.search import JobSearchResult, TrainingCandidate, is_tuning
from windlass.units import format_bytes, format_count, format_seconds

DEGREES = ("tp", "cp", "pp", "ep")


def explain(
    spec: ModelSpec, hardware: Hardware, recipe: Recipe, found: JobSearchResult, best: TrainingCandidate, saved: CheckpointPlan
) -> tuple[Reason, ...]:
    return (
        *_degrees(spec, recipe, best),
        *_lengths(spec, recipe, found, best),
        *_choices(recipe, found, best),
        *_step(best),
        _saving(hardware, saved),
    )


LONGEST_DAYS = 365.0
"""Longer runs are called absurd: the devices are outdated before they end."""
LEAST_MARGIN = 0.02


def warnings(hardware: Hardware, best: TrainingCandidate, days: float, high_bytes: float, known: bool) -> Iterator[Reason]:
    """What a reader must not miss."""
    if best.step is None:
        return
    if days > LONGEST_DAYS:
        more = f"about {_round_up(days / 90):,} times the devices would take three months"
        yield Reason(
            choice="warning",
            value="not a run to start",
            why=f"it would take {days / 365:,.1f} years; {more}, or train on fewer tokens",
        )
    capacity = hardware.devices[0].memory_bytes
    margin = 1 - best.memory.total / capacity
    if margin < LEAST_MARGIN:
        yield Reason(
            choice="warning",
            value="memory",
            why=f"only {margin:.1%} is free: the run may not fit; use a smaller micro-batch or more devices",
        )
    elif high_bytes > capacity:
        most, room = format_bytes(round(high_bytes)), format_bytes(capacity)
        why = f"runs of this class have taken up to {most} where this was predicted, and a device has {room}"
        yield Reason(choice="note", value="memory", why=why)
    if not known:
        yield Reason(
            choice="note",
            value="speed",
            why=f"no published run on devices like {hardware.devices[0].name} was compared: the interval is a guess",
        )


def _round_up(number: float) -> int:
    """To one digit: 7, 20, 300."""
    digits = max(len(str(int(number))) - 1, 0)
    return -(-int(number + 1) // 10**digits) * 10**digits


def _degrees(spec: ModelSpec, recipe: Recipe, best: TrainingCandidate) -> Iterator[Reason]:
    groups = best.job.groups
    why = {
        "tp": "splits matrices and activations within a node",
        "cp": "splits long sequences",
        "pp": f"{-(-spec.num_layers // groups.pp)} of {spec.num_layers} layers per stage",
        "ep": f"{(spec.experts.num_experts if spec.experts else 0) // groups.ep} experts per device",
    }
    for name in DEGREES:
        degree, pin = getattr(groups, name), getattr(recipe.parallel, name)
        if pin is not None:
            yield Reason(choice=name, value=str(degree), why="pinned")
        elif degree > 1:
            yield Reason(choice=name, value=str(degree), why=why[name])
    yield Reason(choice="dp", value=str(groups.dp), why=f"the remaining devices: {groups.world:,} = tp x cp x pp x dp")
    if spec.experts:
        yield Reason(
            choice="expert_dp", value=str(groups.expert_dp), why="expert_tp x ep x pp x expert_dp cover the same devices"
        )


def _lengths(spec: ModelSpec, recipe: Recipe, found: JobSearchResult, best: TrainingCandidate) -> Iterator[Reason]:
    job, tuning = best.job, is_tuning(recipe)
    if job.sequence_tokens > spec.context_tokens:
        why = f"longer than the model's {spec.context_tokens:,}, as data.allow_longer_context allows: the context is extended"
        yield Reason(choice="sequence", value=f"{job.sequence_tokens:,}", why=why)
    wanted, size = format_count(found.batch.wanted_tokens), format_count(job.tokens_per_step)
    origin = {
        "pinned": "pinned",
        "nearest": f"the nearest to {wanted} that is divisible",
        "default": f"the default for {'this model' if not tuning else 'adapters and tuning'} on {_devices(job.groups.world)}; set with --batch",
    }[found.batch.how]
    bubble = f"; {_bubble(best)}" if best.step else ""
    yield Reason(choice="batch", value=f"{job.global_batch:,}", why=f"sequences = {size} tokens, {origin}{bubble}")


def _bubble(best: TrainingCandidate) -> str:
    """The pipeline bubble, which a larger batch would reduce: the pipeline fills and drains once per step."""
    if best.job.groups.pp == 1 or best.step is None:
        return "no pipeline bubble"
    batches = f"{best.job.num_micro_batches:,} micro-batches per replica"
    return f"with {batches} the pipeline bubble is {best.step.pp_bubble / best.step.step_seconds:.0%} of a step"


def _devices(count: int) -> str:
    return f"{count:,} device{'s' if count > 1 else ''}"


def _choices(recipe: Recipe, found: JobSearchResult, best: TrainingCandidate) -> Iterator[Reason]:
    job, held = best.job, best.memory
    batches = f"{job.num_micro_batches:,} micro-batch{'es' if job.num_micro_batches > 1 else ''} per step"
    yield Reason(
        choice="micro_batch", value=str(job.micro_batch), why=f"pinned; {batches}" if recipe.batch.micro_batch else batches
    )
    if job.virtual_stages > 1 or recipe.parallel.virtual_stages:
        yield Reason(choice="virtual_stages", value=str(job.virtual_stages), why=f"divides the bubble by {job.virtual_stages}")
    states = f"model states take {format_bytes(held.states.device)} per device"
    yield Reason(choice="zero", value=str(job.zero), why=f"pinned; {states}" if recipe.parallel.zero is not None else states)
    kept = f"activations take {format_bytes(held.activations)} per device"
    yield Reason(choice="recompute", value=job.recompute, why=f"pinned; {kept}" if recipe.memory.recompute else kept)
    yield Reason(choice="framework", value=f"{job.framework}{', compiled' if job.compile else ''}", why=_framework(recipe, best))
    if job.offload != "none":
        away = f"pinned; {format_bytes(held.states.host)} per device in host memory"
        yield Reason(choice="offload", value=job.offload, why=away)
    yield Reason(
        choice="search",
        value=f"{len(found.fitting)} of {found.num_tried}",
        why="valid configurations fit in memory; the fastest is chosen",
    )


def _framework(recipe: Recipe, best: TrainingCandidate) -> str:
    job = best.job
    chosen = "pinned" if recipe.assume.framework != "auto" else "set with --framework"
    loss = {"whole": "logits are kept whole", "fused": "a fused loss", "chunked": "the loss is computed in chunks"}[job.loss]
    return f"its efficiency is assumed ({chosen}); {loss}"


def _step(best: TrainingCandidate) -> Iterator[Reason]:
    step = best.step
    if step is not None:
        lost = [
            (getattr(step, name), name) for name in ("memory", "tp", "cp", "ep", "pp_bubble", "pp_transfer", "dp", "optimizer")
        ]
        worst = max(lost)
        share = f"{step.compute / step.step_seconds:.0%} is compute; the largest overhead is {worst[1]}, {worst[0] / step.step_seconds:.0%}"
        yield Reason(choice="step", value=format_seconds(step.step_seconds), why=share)


def _saving(hardware: Hardware, saved: CheckpointPlan) -> Reason:
    rate = (
        f"{saved.write_bandwidth / 1e12:.3g} TB/s" if saved.write_bandwidth >= 1e12 else f"{saved.write_bandwidth / 1e9:.3g} GB/s"
    )
    write = f"writing {format_bytes(saved.bytes)} at {rate} takes {format_seconds(saved.write_seconds)}"
    ideal = f"the Young-Daly interval is {format_seconds(saved.young_daly_seconds)}"
    rule = {
        "recipe": "pinned",
        "young_daly": "the Young-Daly interval",
        "write": f"no shorter than a write; {ideal}",
        "floor": f"the minimum interval; {ideal}",
    }[saved.limited_by]
    failures = f"a failure every {format_seconds(saved.mean_seconds_between_failures)} on {_devices(hardware.num_devices)}"
    pause = f"a pause of {format_seconds(saved.pause_seconds)}"
    return Reason(
        choice="checkpoint_interval",
        value=format_seconds(saved.interval_seconds),
        why=f"{rule} ({pause}, {failures}); {write}",
    )
