"""The search over training layouts: all valid ones, those that fit, fastest first. Knows no prices.

A pinned degree is the only one tried, and refused if the model cannot be split that way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, TypeVar

import msgspec

from windlass.core.count import count_parameters
from windlass.core.hardware.spec import Hardware
from windlass.core.layout import TrainingGroups, training_groups
from windlass.core.model import Frozen, ModelSpec
from windlass.core.recipe.recipe import Recipe
from windlass.core.recipe.sections import Recompute
from windlass.core.rule import Rule
from windlass.errors import Impossible
from windlass.tasks.plan.inference.feasible import divisors
from windlass.tasks.plan.training.batch import BatchChoice, choose_batch, default_tokens, tuning_tokens
from windlass.tasks.plan.training.feasible import (
    check_hardware,
    check_precision,
    check_sequence,
    why_not,
    why_not_ep,
    why_not_job,
    why_not_tp,
)
from windlass.tasks.plan.training.frameworks import efficiency, framework_of, loss_of
from windlass.tasks.plan.training.job import TrainingJob
from windlass.tasks.plan.training.memory.footprint import DeviceBytes, Footprints
from windlass.tasks.plan.training.time.candidates import Evaluator
from windlass.tasks.plan.training.time.step import TrainingStepTime

Choice = TypeVar("Choice")

Breadth = Literal["all", "coarse", "lean"]
"""How much is tried: everything; enough for a price; the leanest only, to learn whether anything fits."""
MICRO_BATCHES: dict[Breadth, tuple[int, ...]] = {"all": tuple(range(1, 17)), "coarse": (1, 2, 4), "lean": (1,)}
LONG_CONTEXT_TOKENS = 32_768
"""Context parallelism is tried from here on: for shorter sequences it only makes matmuls smaller (Megatron-Bridge performance guide)."""
CONTEXT_DEGREES = (1, 2, 4, 8, 16)
DEFAULT_SEQUENCE_TOKENS = 4096


class TrainingCandidate(Frozen):
    job: TrainingJob
    memory: DeviceBytes
    step: TrainingStepTime | None
    """None if it does not fit."""

    def short_bytes(self, capacity_bytes: int) -> float:
        return max(0.0, self.memory.total - capacity_bytes)


class JobSearchResult(Frozen):
    fitting: tuple[TrainingCandidate, ...]
    """Fastest first."""
    nearest: TrainingCandidate
    """The one that needs the least memory."""
    num_tried: int
    batch: BatchChoice


def search_jobs(
    spec: ModelSpec,
    rules: tuple[Rule, ...],
    hardware: Hardware,
    recipe: Recipe,
    *,
    breadth: Breadth = "all",
    footprints: Footprints | None = None,
) -> JobSearchResult:
    """`footprints`: reused from a search with the same model and recipe on another device."""
    space = _space(spec, rules, hardware, recipe)
    evaluator = _evaluator(spec, rules, hardware, recipe, footprints)
    if breadth == "all" and not _any_fits(evaluator, space):
        breadth = "lean"  # more micro-batches or virtual stages take more memory: only the nearest is left to find
    fitting, nearest, tried = list[TrainingCandidate](), list[TrainingCandidate](), 0
    for ladder in _ladders(space, breadth):
        for job in ladder:
            tried += 1
            candidate = _try(evaluator, job)
            if candidate.step is None:
                nearest = [min((*nearest, candidate), key=lambda made: made.memory.total)]
                continue
            fitting.append(candidate)
            if job.recompute == ladder[0].recompute:
                break  # the rest shards or recomputes more, for nothing
    if not tried:
        raise Impossible(_why_no_candidate(space))
    fitting.sort(key=lambda made: (made.step.step_seconds if made.step else 0.0, made.job.groups.pp, made.job.groups.tp))
    nearest = [min((*nearest, *fitting), key=lambda made: made.memory.total)]
    return JobSearchResult(fitting=tuple(fitting), nearest=nearest[0], num_tried=tried, batch=space.batch)


def _evaluator(
    spec: ModelSpec, rules: tuple[Rule, ...], hardware: Hardware, recipe: Recipe, footprints: Footprints | None
) -> Evaluator:
    how = efficiency(framework_of(recipe), recipe.run.compile)
    return Evaluator(footprints or Footprints(spec, rules), hardware, recipe.precision.compute, how)


def something_fits(
    spec: ModelSpec, rules: tuple[Rule, ...], hardware: Hardware, recipe: Recipe, footprints: Footprints | None = None
) -> bool:
    """Whether any layout fits: tries the leanest of each kind and stops at the first."""
    try:
        space = _space(spec, rules, hardware, recipe)
    except Impossible:
        return False
    return _any_fits(_evaluator(spec, rules, hardware, recipe, footprints), space)


def _any_fits(evaluator: Evaluator, space: SearchSpace) -> bool:
    """Of each ladder the jobs that recompute most, which take the least memory at their ZeRO stage."""
    leanest = (job for ladder in _ladders(space, "lean") for job in ladder if job.recompute == ladder[-1].recompute)
    return any(map(evaluator.fits, leanest))


class SearchSpace(Frozen):
    """The search space."""

    spec: ModelSpec
    recipe: Recipe
    basis: TrainingJob
    """Fields common to all candidates; all degrees are 1."""
    groups: tuple[TrainingGroups, ...]
    batch: BatchChoice
    num_devices: int


def _space(spec: ModelSpec, rules: tuple[Rule, ...], hardware: Hardware, recipe: Recipe) -> SearchSpace:
    check_hardware(hardware, recipe.memory.offload)
    check_precision(hardware, recipe.precision.compute)
    sequence = recipe.data.sequence_length or min(DEFAULT_SEQUENCE_TOKENS, spec.context_tokens)
    check_sequence(spec, sequence, recipe.data)
    world = hardware.num_devices
    groups = tuple(_groups(spec, hardware, recipe, sequence))
    parts = {(recipe.batch.micro_batch or 1) * made.dp for made in groups}
    total = count_parameters(spec, rules).total
    default = tuning_tokens(world, sequence) if is_tuning(recipe) else default_tokens(total, world, sequence)
    batch = choose_batch(recipe.batch, default, sequence, parts)
    basis = job_basis(recipe, sequence, batch.sequences)
    return SearchSpace(spec=spec, recipe=recipe, basis=basis, groups=groups, batch=batch, num_devices=world)


def is_tuning(recipe: Recipe) -> bool:
    """Adapters, or training that starts from given weights."""
    return recipe.lora.rank is not None or recipe.model.start == "weights"


def job_basis(recipe: Recipe, sequence_tokens: int, global_batch: int) -> TrainingJob:
    return TrainingJob(
        groups=TrainingGroups(tp=1, cp=1, pp=1, dp=1, ep=1, expert_tp=1, expert_dp=1),
        sequence_tokens=sequence_tokens,
        global_batch=global_batch,
        micro_batch=recipe.batch.micro_batch or 1,
        schedule=recipe.parallel.schedule,
        flash_attention=recipe.memory.flash_attention,
        offload=recipe.memory.offload,
        compute=recipe.precision.compute,
        gradients=recipe.precision.gradients,
        optimizer=recipe.optimizer.name,
        overlap=recipe.overlap,
        dispatch=recipe.parallel.dispatch,
        accumulates_apart=recipe.run.engine == "torch",
        next_token=recipe.model.mtp,
        lora=recipe.lora,
        framework=framework_of(recipe),
        compile=recipe.run.compile,
        loss=loss_of(recipe),
        states=recipe.assume.states,
        kept_products=recipe.assume.kept_products,
        shards=recipe.parallel.fsdp if (recipe.parallel.fsdp or 1) > 1 else None,
    )


def _try(evaluator: Evaluator, job: TrainingJob) -> TrainingCandidate:
    return TrainingCandidate(job=job, memory=evaluator.memory(job), step=evaluator.step(job) if evaluator.fits(job) else None)


def _groups(spec: ModelSpec, hardware: Hardware, recipe: Recipe, sequence_tokens: int) -> Iterator[TrainingGroups]:
    """Dense and expert groups over all devices."""
    parallel, world = recipe.parallel, hardware.num_devices
    inside = hardware.devices_per_node
    experts = [ep for ep in _pinned(parallel.ep, _expert_degrees(spec)) if not why_not_ep(spec, ep, parallel.expert_tp or 1)]
    for tp in _pinned(parallel.tp, divisors(inside)):
        if why_not_tp(spec, tp):
            continue
        for cp in _pinned(parallel.cp, CONTEXT_DEGREES if sequence_tokens >= LONG_CONTEXT_TOKENS else (1,)):
            for pp in _pinned(parallel.pp, (degree for degree in divisors(world) if degree <= spec.num_layers)):
                if world % (tp * cp * pp) == 0:
                    yield from _expert_groups(experts, parallel.expert_tp or 1, world, tp, cp, pp)


def _expert_degrees(spec: ModelSpec) -> tuple[int, ...]:
    return divisors(spec.experts.num_experts) if spec.experts else (1,)


def _expert_groups(experts: list[int], expert_tp: int, world: int, tp: int, cp: int, pp: int) -> Iterator[TrainingGroups]:
    """expert_tp is 1 unless pinned: splitting small expert matrices costs more than it saves (Megatron-Bridge performance guide)."""
    for ep in experts:
        if (world // pp) % (ep * expert_tp) == 0:
            yield training_groups(world, tp=tp, cp=cp, pp=pp, ep=ep, expert_tp=expert_tp)


def _ladders(space: SearchSpace, breadth: Breadth) -> Iterator[tuple[TrainingJob, ...]]:
    """Jobs that differ only in ZeRO stage and recomputation, in increasing cost: a higher ZeRO stage never moves less data, and
    recomputation adds FLOPs."""
    for groups in space.groups:
        if space.basis.global_batch % groups.dp == 0:
            for micro, virtual in _pieces(space, groups, breadth):
                if ladder := tuple(_ladder(space, groups, micro, virtual)):
                    yield ladder


def _pieces(space: SearchSpace, groups: TrainingGroups, breadth: Breadth) -> Iterator[tuple[int, int]]:
    """Micro-batches and virtual stages."""
    recipe, per_replica = space.recipe, space.basis.global_batch // groups.dp
    for micro in _pinned(recipe.batch.micro_batch, (size for size in MICRO_BATCHES[breadth] if per_replica % size == 0)):
        chunks = (1,) if breadth == "lean" else _virtual_stages(space.spec, groups.pp, per_replica // micro)
        for virtual in _pinned(recipe.parallel.virtual_stages, chunks):
            yield micro, virtual


def _ladder(space: SearchSpace, groups: TrainingGroups, micro: int, virtual: int) -> Iterator[TrainingJob]:
    basis, parallel = space.basis, space.recipe.parallel
    sequence_parallel = parallel.sequence_parallel if parallel.sequence_parallel is not None else groups.tp > 1
    for zero in _pinned(parallel.zero, _zero_stages(groups, basis)):
        for recompute in _pinned(space.recipe.memory.recompute, _recomputes(basis)):
            job = msgspec.structs.replace(
                basis,
                groups=groups,
                micro_batch=micro,
                virtual_stages=virtual,
                zero=zero,
                recompute=recompute,
                sequence_parallel=sequence_parallel,
            )
            if not why_not_job(space.spec, job):
                yield job


def _virtual_stages(spec: ModelSpec, pp: int, num_micro_batches: int) -> tuple[int, ...]:
    """Interleaving needs micro-batches in whole rounds of the pipeline (Megatron-Core `forward_backward_pipelining_with_interleaving`)."""
    if pp == 1 or num_micro_batches % pp:
        return (1,)
    chunks = divisors(-(-spec.num_layers // pp))
    return tuple(sorted({1, *chunks[1:3], chunks[-1]}))


def _zero_stages(groups: TrainingGroups, basis: TrainingJob) -> tuple[int, ...]:
    if basis.offload != "none" and groups.tp * groups.pp == 1:
        return (3,)
    if groups.dp * groups.cp == 1:
        return (1,)
    return (1, 2, 3) if groups.pp == 1 and basis.offload == "none" else (1, 2)


def _recomputes(basis: TrainingJob) -> tuple[Recompute, ...]:
    """Flash attention keeps no scores, so there is nothing for selective recomputation to save."""
    return ("none", "full") if basis.flash_attention else ("none", "selective", "full")


def _pinned(pin: Choice | None, choices: Iterable[Choice]) -> Iterable[Choice]:
    return choices if pin is None else (pin,)


def _why_no_candidate(space: SearchSpace) -> str:
    """Why there is no candidate: checks the pinned values one by one."""
    spec, basis, parallel, world = space.spec, space.basis, space.recipe.parallel, space.num_devices
    tp, pp, cp, ep = parallel.tp or 1, parallel.pp or 1, parallel.cp or 1, parallel.ep or 1
    expert_tp = parallel.expert_tp or 1
    reason = why_not_tp(spec, tp) or why_not_ep(spec, ep, expert_tp)
    if reason:
        return reason
    groups = training_groups(world, tp=tp, cp=cp, pp=pp, ep=ep, expert_tp=expert_tp)  # raises if the degrees do not divide
    zero = parallel.zero if parallel.zero is not None else 1
    sequence_parallel = parallel.sequence_parallel if parallel.sequence_parallel is not None else tp > 1
    job = msgspec.structs.replace(
        basis, groups=groups, zero=zero, virtual_stages=parallel.virtual_stages or 1, sequence_parallel=sequence_parallel
    )
    return (
        why_not(spec, job)
        or f"no layout of {world} devices divides a global batch of {basis.global_batch}; use a multiple of {world}"
    )
