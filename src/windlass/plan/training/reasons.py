"""Why each value of a training plan is what it is, in words with numbers. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterator

from windlass.core.hardware import Hardware
from windlass.core.model import ModelSpec
from windlass.core.plan import Reason
from windlass.core.recipe import Recipe
from windlass.plan.training.checkpoint import CheckpointPlan
from windlass.plan.training.search import Candidate, Found
from windlass.units import format_bytes, format_seconds

DEGREES = ("tp", "cp", "pp", "ep")


def explain(
    spec: ModelSpec, hardware: Hardware, recipe: Recipe, found: Found, best: Candidate, saved: CheckpointPlan
) -> tuple[Reason, ...]:
    return (*_degrees(spec, recipe, best), *_choices(recipe, found, best), *_run(hardware, found, best, saved))


def _degrees(spec: ModelSpec, recipe: Recipe, best: Candidate) -> Iterator[Reason]:
    groups = best.job.groups
    why = {
        "tp": "shares a layer's matrices and activations inside a node",
        "cp": "cuts long sequences",
        "pp": f"{-(-spec.num_layers // groups.pp)} of {spec.num_layers} layers a stage",
        "ep": f"{(spec.experts.num_experts if spec.experts else 0) // groups.ep} experts a device",
    }
    for name in DEGREES:
        degree, pin = getattr(groups, name), getattr(recipe.parallel, name)
        if pin is not None:
            yield Reason(choice=name, value=str(degree), why="pinned by the recipe")
        elif degree > 1:
            yield Reason(choice=name, value=str(degree), why=why[name])
    yield Reason(choice="dp", value=str(groups.dp), why=f"what is left: {groups.world} = tp x cp x pp x dp")
    if spec.experts:
        yield Reason(
            choice="expert_dp", value=str(groups.expert_dp), why="the expert grid is etp x ep x pp x edp over the same devices"
        )


def _choices(recipe: Recipe, found: Found, best: Candidate) -> Iterator[Reason]:
    job, held = best.job, best.memory
    batches = f"{job.num_micro_batches} micro-batches a step"
    yield Reason(
        choice="micro_batch", value=str(job.micro_batch), why="pinned by the recipe" if recipe.batch.micro_batch else batches
    )
    if job.virtual_stages > 1 or recipe.parallel.virtual_stages:
        yield Reason(choice="virtual_stages", value=str(job.virtual_stages), why=f"divides the bubble by {job.virtual_stages}")
    states = f"states take {format_bytes(held.states.device)} a device"
    yield Reason(
        choice="zero", value=str(job.zero), why=f"pinned by the recipe; {states}" if recipe.parallel.zero is not None else states
    )
    kept = f"activations take {format_bytes(held.activations)} a device"
    pinned = f"pinned by the recipe; {kept}"
    yield Reason(choice="recompute", value=job.recompute, why=pinned if recipe.memory.recompute else kept)
    yield Reason(
        choice="search",
        value=f"{len(found.fitting)} of {found.num_tried}",
        why="layouts that divide also fit; the fastest is taken",
    )


def _run(hardware: Hardware, found: Found, best: Candidate, saved: CheckpointPlan) -> Iterator[Reason]:
    step = best.step
    if step is not None:
        lost = [
            (getattr(step, name), name) for name in ("memory", "tp", "cp", "ep", "pp_bubble", "pp_transfer", "dp", "optimizer")
        ]
        worst = max(lost)
        share = f"{step.compute / step.step_seconds:.0%} computes; the largest loss is {worst[1]} with {worst[0] / step.step_seconds:.0%}"
        yield Reason(choice="step", value=format_seconds(step.step_seconds), why=share)
    every = f"a failure every {format_seconds(saved.mean_seconds_between_failures)} on {len(hardware.devices)} devices"
    why = f"Young and Daly: {format_bytes(saved.bytes)}, a pause of {format_seconds(saved.pause_seconds)}, {every}"
    yield Reason(choice="checkpoint_interval", value=format_seconds(saved.interval_seconds), why=why)
