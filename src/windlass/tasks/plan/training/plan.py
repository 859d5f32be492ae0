"""Plans a training run: layout, memory, step time, days, energy, cost, checkpoints and reasons. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from windlass.core.count import ParameterCount, count_parameters
from windlass.core.hardware.energy import DEFAULT_PUE, co2_kg, energy_kwh, grid
from windlass.core.hardware.spec import Hardware
from windlass.core.layout import TrainingGroups
from windlass.core.model import Frozen, ModelSpec
from windlass.core.plan import Reason
from windlass.core.recipe.recipe import Recipe
from windlass.core.rule import Rule
from windlass.tasks.plan.training.checkpoint import CheckpointPlan, checkpoint_bytes, plan_checkpoints
from windlass.tasks.plan.training.intervals import Interval, intervals_of
from windlass.tasks.plan.training.job import TrainingJob
from windlass.tasks.plan.training.memory.footprint import Footprints
from windlass.tasks.plan.training.memory.states import adapter_elements
from windlass.tasks.plan.training.reasons import LEAST_MARGIN, explain, warnings
from windlass.tasks.plan.training.remedy import RemedyCase, remedies
from windlass.tasks.plan.training.search import Breadth, JobSearchResult, TrainingCandidate, is_tuning, search_jobs
from windlass.tasks.plan.training.time.rates import SECONDS_PER_DAY, Rates, adapter_flops, flops_per_token, peak_flops, rates_of
from windlass.tasks.plan.training.time.step import TrainingStepTime

CHINCHILLA_TOKENS_PER_PARAMETER = 20
"""Compute-optimal tokens per parameter (arXiv 2203.15556, table 3), if the recipe sets no tokens."""


TUNING_TOKENS = 100_000_000
"""Of adapters and of training that starts from given weights, if the recipe sets none: fifty thousand examples of 2,000 tokens."""


class Prices(Frozen):
    """Cost of a device-hour, in dollars and carbon."""

    usd_per_device_hour: float | None = None
    grams_co2_per_kwh: float | None = None
    """None: the world average."""
    pue: float = DEFAULT_PUE


class TrainingMemory(Frozen):
    """Of the fullest device."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    working_bytes: int
    activation_bytes: int
    overhead_bytes: int
    total_bytes: int
    capacity_bytes: int
    host_bytes: int
    """In host memory, per device."""
    disk_bytes: int


class TrainingIntervals(Frozen):
    """80 % intervals, from the residuals of published runs of the same class. None without a prediction."""

    tokens_per_second: Interval | None
    step_seconds: Interval | None
    days: Interval | None
    total_bytes: Interval
    known: bool
    """Whether published runs on this class of device were compared; else the intervals are wider by a guess."""


class TrainingAlternative(Frozen):
    layout: TrainingGroups
    micro_batch: int
    virtual_stages: int
    zero: int
    recompute: str
    step_seconds: float
    total_bytes: int
    why_not: str


class RunTotals(Frozen):
    """Totals of the run. Hours, energy and cost include failures and checkpoints."""

    tokens: int
    steps: int
    days: float
    """Without failures and checkpoints."""
    days_with_failures: float
    device_hours: float
    kwh: float
    kg_co2: float
    usd: float | None


class TrainingPlan(Frozen):
    fits: bool
    short_bytes: int
    would_fit: tuple[str, ...]
    """Changes that would make it fit, each by itself and verified, mildest first."""
    job: TrainingJob
    layout: TrainingGroups
    num_devices: int
    memory: TrainingMemory
    states_bytes_per_device: int
    activation_bytes_per_device: int
    step_seconds: float
    breakdown: TrainingStepTime | None
    rates: Rates | None
    model_flops_utilization: float
    days: float
    """Without failures and checkpoints; `run` has the totals."""
    run: RunTotals
    intervals: TrainingIntervals
    checkpoint: CheckpointPlan
    reasons: tuple[Reason, ...]
    alternatives: tuple[TrainingAlternative, ...]


class TrainingInputs(Frozen):
    """Inputs of the planner."""

    spec: ModelSpec
    rules: tuple[Rule, ...]
    hardware: Hardware
    recipe: Recipe
    prices: Prices

    @property
    def num_devices(self) -> int:
        return self.hardware.num_devices

    @property
    def case(self) -> RemedyCase:
        return RemedyCase(spec=self.spec, rules=self.rules, hardware=self.hardware, recipe=self.recipe)


def plan_training(
    spec: ModelSpec,
    rules: tuple[Rule, ...],
    hardware: Hardware,
    recipe: Recipe,
    prices: Prices | None = None,
    *,
    breadth: Breadth = "all",
    footprints: Footprints | None = None,
) -> TrainingPlan:
    """The fastest job that fits; if none does, the one that needs the least memory, with the missing bytes."""
    spec = as_trained(spec, recipe)
    found = search_jobs(spec, rules, hardware, recipe, breadth=breadth, footprints=footprints)
    best = _preferred(found, hardware.devices[0].memory_bytes)
    return _assemble(
        TrainingInputs(spec=spec, rules=rules, hardware=hardware, recipe=recipe, prices=prices or Prices()), found, best
    )


def _preferred(found: JobSearchResult, capacity_bytes: int) -> TrainingCandidate:
    """The fastest that leaves some memory free, if any does: a plan to the last byte is a plan that fails."""
    roomy = (made for made in found.fitting if made.memory.total <= (1 - LEAST_MARGIN) * capacity_bytes)
    return next(roomy, found.fitting[0] if found.fitting else found.nearest)


def as_trained(spec: ModelSpec, recipe: Recipe) -> ModelSpec:
    """The model with the recipe's dropout."""
    return spec if recipe.model.dropout is None else msgspec.structs.replace(spec, dropout=recipe.model.dropout)


def _assemble(inputs: TrainingInputs, found: JobSearchResult, best: TrainingCandidate) -> TrainingPlan:
    job, step_seconds = best.job, best.step.step_seconds if best.step else 0.0
    capacity = inputs.hardware.devices[0].memory_bytes
    counted = count_parameters(inputs.spec, inputs.rules)
    rates, saved = _rates(inputs, job, step_seconds), _checkpoints(inputs, job, counted)
    run = _run(inputs, job, step_seconds, saved, counted)
    short = round(best.short_bytes(capacity))
    ranges = _intervals(inputs, best, rates, run)
    return TrainingPlan(
        fits=best.step is not None,
        short_bytes=short,
        would_fit=() if best.step else remedies(inputs.case),
        job=job,
        layout=job.groups,
        num_devices=inputs.num_devices,
        memory=_memory(best, capacity),
        states_bytes_per_device=round(best.memory.states.device),
        activation_bytes_per_device=round(best.memory.activations),
        step_seconds=step_seconds,
        breakdown=best.step,
        rates=rates,
        model_flops_utilization=rates.model_flops_utilization if rates else 0.0,
        days=run.days,
        run=run,
        intervals=ranges,
        checkpoint=saved,
        reasons=(
            *warnings(inputs.hardware, best, run.days_with_failures, ranges.total_bytes.high, ranges.known),
            *explain(inputs.spec, inputs.hardware, inputs.recipe, found, best, saved),
        ),
        alternatives=_alternatives(found, best),
    )


def _intervals(inputs: TrainingInputs, best: TrainingCandidate, rates: Rates | None, run: RunTotals) -> TrainingIntervals:
    found = intervals_of(inputs.spec, best.job, inputs.hardware.devices[0])
    slower = found.speed.inverse
    return TrainingIntervals(
        tokens_per_second=found.speed.times(rates.tokens_per_second) if rates else None,
        step_seconds=slower.times(best.step.step_seconds) if best.step else None,
        days=slower.times(run.days_with_failures) if best.step else None,
        total_bytes=found.memory.times(best.memory.total),
        known=found.known,
    )


def _run(
    inputs: TrainingInputs, job: TrainingJob, step_seconds: float, saved: CheckpointPlan, counted: ParameterCount
) -> RunTotals:
    """Failures and checkpoints lengthen the run, and with it energy and cost."""
    tokens = _tokens(inputs.recipe, job, counted)
    steps = -(-tokens // job.tokens_per_step)
    days = steps * step_seconds / SECONDS_PER_DAY
    hours = days / saved.goodput * 24 * inputs.num_devices
    prices = inputs.prices
    kwh = energy_kwh(hours, inputs.hardware.devices[0].watts, prices.pue)
    grams = prices.grams_co2_per_kwh if prices.grams_co2_per_kwh is not None else grid().grams_per_kwh
    return RunTotals(
        tokens=tokens,
        steps=steps,
        days=days,
        days_with_failures=days / saved.goodput,
        device_hours=hours,
        kwh=kwh,
        kg_co2=co2_kg(kwh, grams),
        usd=None if prices.usd_per_device_hour is None else hours * prices.usd_per_device_hour,
    )


def _trained_parameters(inputs: TrainingInputs, job: TrainingJob, counted: ParameterCount) -> int:
    """Parameters in a checkpoint; frozen ones are not saved."""
    if job.lora.rank is not None:
        return sum(adapter_elements(rule, job.lora) * rule.copies for rule in inputs.rules)
    return counted.checkpoint if job.next_token else counted.total


def _tokens(recipe: Recipe, job: TrainingJob, counted: ParameterCount) -> int:
    """schedule.steps takes precedence over data.tokens, as in the trainer."""
    if recipe.schedule.steps is not None:
        return recipe.schedule.steps * job.tokens_per_step
    if is_tuning(recipe):
        return recipe.data.tokens or TUNING_TOKENS
    return recipe.data.tokens or CHINCHILLA_TOKENS_PER_PARAMETER * counted.total


def _rates(inputs: TrainingInputs, job: TrainingJob, step_seconds: float) -> Rates | None:
    if not step_seconds:
        return None
    flops = flops_per_token(inputs.spec, inputs.rules, job.sequence_tokens, recompute=job.recompute, next_token=job.next_token)
    flops = adapter_flops(flops) if job.lora.rank is not None else flops
    peak = peak_flops(inputs.hardware.devices[0], job.compute)
    return rates_of(flops, job.tokens_per_step, step_seconds, job.groups.world, peak)


def _checkpoints(inputs: TrainingInputs, job: TrainingJob, counted: ParameterCount) -> CheckpointPlan:
    size = checkpoint_bytes(_trained_parameters(inputs, job, counted), job)
    return plan_checkpoints(size, inputs.hardware, inputs.recipe.checkpoint)


def _memory(best: TrainingCandidate, capacity_bytes: int) -> TrainingMemory:
    held, states = best.memory, best.memory.states
    return TrainingMemory(
        weights_bytes=round(states.weights),
        gradients_bytes=round(states.gradients),
        optimizer_bytes=round(states.optimizer),
        working_bytes=round(states.working),
        activation_bytes=round(held.activations),
        overhead_bytes=round(held.overhead),
        total_bytes=round(held.total),
        capacity_bytes=capacity_bytes,
        host_bytes=round(states.host),
        disk_bytes=round(states.disk),
    )


def _alternatives(found: JobSearchResult, best: TrainingCandidate) -> tuple[TrainingAlternative, ...]:
    """The two next fastest with different layouts."""
    made, seen = list[TrainingAlternative](), {best.job.groups}
    for other in found.fitting:
        if other.step is None or other.job.groups in seen or best.step is None:
            continue
        seen.add(other.job.groups)
        slower = other.step.step_seconds / best.step.step_seconds - 1
        made.append(
            TrainingAlternative(
                layout=other.job.groups,
                micro_batch=other.job.micro_batch,
                virtual_stages=other.job.virtual_stages,
                zero=other.job.zero,
                recompute=other.job.recompute,
                step_seconds=other.step.step_seconds,
                total_bytes=round(other.memory.total),
                why_not=f"{slower:.1%} slower" if slower >= 0 else f"{-slower:.1%} faster, but it fills the memory",
            )
        )
        if len(made) == 2:
            break
    return tuple(made)


def train_section(plan: TrainingPlan) -> dict[str, Any]:
    """The `train` object of the plan's JSON; the first five keys are stable."""
    fields: dict[str, Any] = {**msgspec.to_builtins(plan), "cp": plan.layout.cp}
    first = ("step_seconds", "model_flops_utilization", "days", "states_bytes_per_device", "activation_bytes_per_device")
    return {**{key: fields[key] for key in first}, **{key: value for key, value in fields.items() if key not in first}}
