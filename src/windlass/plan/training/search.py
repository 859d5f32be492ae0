"""Every layout that divides, the ones that fit, the fastest first. Knows no prices.

A degree the recipe pins is the only one tried, and is refused if the model cannot be cut so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec

from windlass.core.hardware import Hardware
from windlass.core.layout import TrainingGroups, training_groups
from windlass.core.model import Frozen, ModelSpec
from windlass.core.recipe import Recipe, Recompute
from windlass.core.rule import Rule
from windlass.errors import Impossible
from windlass.plan.training.evaluate import DeviceBytes, Evaluator
from windlass.plan.training.feasible import check_hardware, check_model, divisors, why_not, why_not_ep, why_not_tp
from windlass.plan.training.job import Job
from windlass.plan.training.time import StepTime

Choice = TypeVar("Choice")

MAX_MICRO_BATCH = 16
LONG_CONTEXT_TOKENS = 32_768
"""From here on context parallelism is tried: below, it only makes products thinner (Megatron-Bridge performance guide)."""
CONTEXT_DEGREES = (1, 2, 4, 8, 16)
DEFAULT_SEQUENCE_TOKENS = 4096
DEFAULT_BATCH_TOKENS = 4 * 2**20
"""What large pre-training runs begin with (Llama 3: 4M tokens, arXiv 2407.21783, 3.4.1)."""


class Candidate(Frozen):
    job: Job
    memory: DeviceBytes
    step: StepTime | None
    """None where it does not fit and so was not timed."""

    def short_bytes(self, capacity_bytes: int) -> float:
        return max(0.0, self.memory.total - capacity_bytes)


class Found(Frozen):
    fitting: tuple[Candidate, ...]
    """Fastest first."""
    nearest: Candidate
    """The one that needs least memory."""
    num_tried: int


def search_jobs(spec: ModelSpec, rules: tuple[Rule, ...], hardware: Hardware, recipe: Recipe) -> Found:
    check_hardware(hardware)
    basis = job_basis(spec, recipe)
    check_model(spec, basis.sequence_tokens)
    evaluator = Evaluator(spec, rules, hardware, recipe.precision.compute)
    fitting, nearest, tried = list[Candidate](), list[Candidate](), 0
    for groups in _groups(spec, hardware, recipe, basis):
        for job in _jobs(spec, recipe, basis, groups):
            tried += 1
            candidate = _try(evaluator, job)
            if candidate.step is None:
                nearest = [min((*nearest, candidate), key=lambda made: made.memory.total)]
            else:
                fitting.append(candidate)
    if not tried:
        raise Impossible(_nothing(spec, hardware, recipe, basis))
    fitting.sort(key=lambda made: (made.step.step_seconds if made.step else 0.0, made.job.groups.pp, made.job.groups.tp))
    return Found(fitting=tuple(fitting), nearest=min((*nearest, *fitting), key=lambda made: made.memory.total), num_tried=tried)


def job_basis(spec: ModelSpec, recipe: Recipe) -> Job:
    """What every candidate shares; degrees of one."""
    sequence = recipe.data.sequence_length or min(DEFAULT_SEQUENCE_TOKENS, spec.context_tokens)
    batch = recipe.batch.global_batch or max((recipe.batch.tokens or DEFAULT_BATCH_TOKENS) // sequence, 1)
    return Job(
        groups=TrainingGroups(tp=1, cp=1, pp=1, dp=1, ep=1, expert_tp=1, expert_dp=1),
        sequence_tokens=sequence,
        global_batch=batch,
        micro_batch=recipe.batch.micro_batch or 1,
        schedule=recipe.parallel.schedule,
        flash_attention=recipe.memory.flash_attention,
        offload=recipe.memory.offload,
        compute=recipe.precision.compute,
        gradients=recipe.precision.gradients,
        optimizer=recipe.optimizer.name,
        overlap=recipe.overlap,
        dispatch=recipe.parallel.dispatch,
        next_token=recipe.model.mtp,
    )


def _try(evaluator: Evaluator, job: Job) -> Candidate:
    memory = evaluator.memory(job)
    fits = memory.total <= evaluator.capacity_bytes and _fits_host(evaluator.hardware, memory)
    return Candidate(job=job, memory=memory, step=evaluator.step(job) if fits else None)


def _fits_host(hardware: Hardware, memory: DeviceBytes) -> bool:
    node = hardware.nodes[0]
    share = len(node.devices)
    return memory.states.host * share <= node.ram_bytes and memory.states.disk * share <= node.disk_bytes


def _groups(spec: ModelSpec, hardware: Hardware, recipe: Recipe, basis: Job) -> Iterator[TrainingGroups]:
    """Both grids, dense and expert, over all devices."""
    parallel, world = recipe.parallel, len(hardware.devices)
    inside = hardware.devices_per_node
    for tp in _pinned(parallel.tp, (degree for degree in divisors(inside) if not why_not_tp(spec, degree))):
        for cp in _pinned(parallel.cp, CONTEXT_DEGREES if basis.sequence_tokens >= LONG_CONTEXT_TOKENS else (1,)):
            for pp in _pinned(parallel.pp, (degree for degree in divisors(world) if degree <= spec.num_layers)):
                if world % (tp * cp * pp) == 0:
                    yield from _expert_groups(spec, recipe, world, tp, cp, pp)


def _expert_groups(spec: ModelSpec, recipe: Recipe, world: int, tp: int, cp: int, pp: int) -> Iterator[TrainingGroups]:
    """expert_tp is 1 unless pinned: cutting an expert's small matrices costs more than it saves (Megatron-Bridge performance guide)."""
    parallel, expert_tp = recipe.parallel, recipe.parallel.expert_tp or 1
    num_experts = spec.experts.num_experts if spec.experts else 1
    for ep in _pinned(parallel.ep, divisors(num_experts)):
        if (world // pp) % (ep * expert_tp) == 0 and not why_not_ep(spec, ep, expert_tp):
            yield training_groups(world, tp=tp, cp=cp, pp=pp, ep=ep, expert_tp=expert_tp)


def _jobs(spec: ModelSpec, recipe: Recipe, basis: Job, groups: TrainingGroups) -> Iterator[Job]:
    if basis.global_batch % groups.dp:
        return
    parallel, per_replica = recipe.parallel, basis.global_batch // groups.dp
    sequence_parallel = parallel.sequence_parallel if parallel.sequence_parallel is not None else groups.tp > 1
    for micro in _pinned(recipe.batch.micro_batch, (size for size in divisors(per_replica) if size <= MAX_MICRO_BATCH)):
        for virtual in _pinned(parallel.virtual_stages, _virtual_stages(spec, groups.pp, per_replica // micro)):
            for zero in _pinned(parallel.zero, _zero_stages(groups, basis)):
                for recompute in _pinned(recipe.memory.recompute, _recomputes(basis)):
                    job = msgspec.structs.replace(
                        basis,
                        groups=groups,
                        micro_batch=micro,
                        virtual_stages=virtual,
                        zero=zero,
                        recompute=recompute,
                        sequence_parallel=sequence_parallel,
                    )
                    if not why_not(spec, job):
                        yield job


def _virtual_stages(spec: ModelSpec, pp: int, num_micro_batches: int) -> tuple[int, ...]:
    """Interleaving needs micro-batches in whole rounds of the pipeline (Megatron-Core `forward_backward_pipelining_with_interleaving`)."""
    if pp == 1 or num_micro_batches % pp:
        return (1,)
    chunks = divisors(-(-spec.num_layers // pp))
    return tuple(sorted({1, *chunks[1:3], chunks[-1]}))


def _zero_stages(groups: TrainingGroups, basis: Job) -> tuple[int, ...]:
    if basis.offload != "none":
        return (3,)
    if groups.dp * groups.cp == 1:
        return (1,)
    return (1, 2, 3) if groups.pp == 1 else (1, 2)


def _recomputes(basis: Job) -> tuple[Recompute, ...]:
    """Flash attention keeps no scores, so there is nothing for selective recomputation to save."""
    return ("none", "full") if basis.flash_attention else ("none", "selective", "full")


def _pinned(pin: Choice | None, choices: Iterable[Choice]) -> Iterable[Choice]:
    return choices if pin is None else (pin,)


def _nothing(spec: ModelSpec, hardware: Hardware, recipe: Recipe, basis: Job) -> str:
    """Why no candidate was left: what is pinned, looked at one by one."""
    parallel, world = recipe.parallel, len(hardware.devices)
    tp, pp, cp, ep = parallel.tp or 1, parallel.pp or 1, parallel.cp or 1, parallel.ep or 1
    expert_tp = parallel.expert_tp or 1
    reason = why_not_tp(spec, tp) or why_not_ep(spec, ep, expert_tp)
    if reason:
        return reason
    groups = training_groups(world, tp=tp, cp=cp, pp=pp, ep=ep, expert_tp=expert_tp)  # says itself what does not divide
    zero = parallel.zero if parallel.zero is not None else 1
    sequence_parallel = parallel.sequence_parallel if parallel.sequence_parallel is not None else tp > 1
    job = msgspec.structs.replace(
        basis, groups=groups, zero=zero, virtual_stages=parallel.virtual_stages or 1, sequence_parallel=sequence_parallel
    )
    told = why_not(spec, job)
    return (
        told
        or f"no layout of {world} devices divides a batch of {basis.global_batch} sequences; try a batch that is a multiple of {world}"
    )
