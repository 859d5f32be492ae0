"""Operations of feed-forwards per rank and micro-batch: dense, gated, and MoE with even routing."""

from __future__ import annotations

from windlass.core.model import Dense, FeedForward, MoE
from windlass.tasks.plan.training.job import TrainingJob
from windlass.tasks.plan.training.work.attention import BF16, input_bytes
from windlass.tasks.plan.training.work.operation import KernelWork, Operation, OperationKind, adapted, casts, matmul, memory

ROUTING_KERNELS = 30
"""An estimate, not a count: sigmoid, top-k, normalise, the passes of a radix sort, histogram, scan, scatter, gathers."""


def feed_forward_operations(ffn: FeedForward, hidden: int, job: TrainingJob, *, own_input: bool = True) -> tuple[Operation, ...]:
    """`own_input`: the normed input is not the mixer's as well, so it is kept here."""
    shared_input = input_bytes(job) * job.input_tokens * hidden if own_input else 0.0
    if isinstance(ffn, Dense):
        width = ffn.intermediate_size / job.groups.tp
        return _two_layers("ffn", job.micro_tokens, hidden, width, ffn.gated, job, shared_input)
    return _experts(ffn, hidden, job, shared_input)


def _two_layers(
    name: str, rows: float, hidden: int, width: float, gated: bool, job: TrainingJob, input_saved: float, experts: float = 0
) -> tuple[Operation, ...]:
    """Up (and gate), activation, down. GELU keeps its input; a gate keeps both halves (arXiv 2205.05198, 4.1: 8 + 8 sbh)."""
    first = (2 if gated else 1) * width
    activation = memory(
        f"{name} activation", rows * width, 6 if gated else 4, 10 if gated else 6, saved_bytes=BF16 * rows * first
    )
    target = "experts" if experts else "feed_forward"
    up = matmul(f"{name} up", rows, hidden, first, compute=job.compute, saved_bytes=input_saved, experts=experts)
    kept = input_bytes(job) * rows * width
    down = matmul(f"{name} down", rows, width, hidden, compute=job.compute, saved_bytes=kept, experts=experts)
    return (
        *casts(f"{name} up", job.compute, rows, hidden, first),
        *adapted((up,), f"{name} up", rows, hidden, first, job, target),
        activation,
        *casts(f"{name} down", job.compute, rows, width, hidden),
        *adapted((down,), f"{name} down", rows, width, hidden, job, target),
    )


def _experts(moe: MoE, hidden: int, job: TrainingJob, shared_input: float) -> tuple[Operation, ...]:
    """Router in fp32, tokens sorted by expert (read and written once), a grouped product per matrix, and back (gathered, then summed:
    twice; index_add is eight times slower, bench/kernels/training_kernels.py).

    The router's weight is applied inside the activation, so the experts' outputs are not kept (Megatron-Core's weighted SwiGLU).
    """
    groups, outside = job.groups, job.outside_tokens
    rows = job.expert_rows * moe.num_active
    width = moe.intermediate_size / groups.expert_tp
    local_experts = moe.num_experts / groups.ep
    passes = 2 if groups.ep > 1 else 1  # by destination before the exchange, by expert after it
    permute = memory("permute", passes * rows * hidden, 4, 8)
    combine = memory("combine", passes * rows * hidden, 8, 4)
    router = matmul(
        "router", outside, hidden, moe.num_experts, compute="fp32", saved_bytes=shared_input + 4 * outside * moe.num_experts
    )
    routed = _two_layers("experts", rows, hidden, width, True, job, input_bytes(job) * rows * hidden, experts=local_experts)
    shared = moe.shared_intermediate_size / groups.tp
    always = _two_layers("shared expert", job.micro_tokens, hidden, shared, True, job, 0.0) if shared else ()
    return (router, _bookkeeping(), permute, *routed, combine, *always)


def _bookkeeping() -> Operation:
    """Top-k, sort, counts, offsets and their inverse: small kernels, each no longer than its launch."""
    small = KernelWork(flops=0.0, moved_bytes=0.0)
    return Operation(
        name="routing", kind=OperationKind.MEMORY, forward=(small,) * ROUTING_KERNELS, backward=(small,) * (ROUTING_KERNELS // 3)
    )
