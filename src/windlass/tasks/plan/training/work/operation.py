"""An operation on one rank for one micro-batch: FLOPs, memory traffic, and bytes kept for the backward.

Activation memory and step time are sums over the same list of operations. Knows no device.
"""

from __future__ import annotations

from enum import Enum

from windlass.core.model import Frozen
from windlass.core.recipe.sections import Compute
from windlass.tasks.plan.training.job import TrainingJob


class OperationKind(Enum):
    MATMUL = "matmul"
    """Weights times activations: runs at the rate of the compute type."""
    PRODUCT = "product"
    """Activations times activations, unfused attention: 16 bits whatever the compute type."""
    FLASH = "flash"
    MEMORY = "memory"
    """Memory-bound: norms, activations, residuals, permutations."""


class KernelWork(Frozen):
    """One kernel. Operations include those spent on padding."""

    flops: float
    moved_bytes: float


class Operation(Frozen):
    name: str
    kind: OperationKind
    forward: tuple[KernelWork, ...]
    backward: tuple[KernelWork, ...]
    saved_bytes: float = 0.0
    """Kept from forward to backward."""
    core: bool = False
    """Part of the attention core, which selective recomputation computes again instead of keeping (arXiv 2205.05198, 5)."""
    output_bytes: float = 0.0
    """Of products and attention, which recomputation per operation keeps or makes again."""


def by_operation(job: TrainingJob) -> bool:
    """With fused attention there are no scores to compute again, so `selective` means per operation: every second product and all small
    operations are computed again (torchtitan, per-op selective checkpointing)."""
    return job.recompute == "selective" and job.flash_attention


EXPERT_TILE_ROWS = 128
"""Rows lost per expert of a grouped product: its last tile is partly empty, its first one waits for data. Measured on an H200 with
torch._grouped_mm: 4096 rows an expert reach 632 TFLOP/s, 2048 620, 512 509 (means); 673 * rows / (rows + 128) is 2 to 6 % above
that (bench/kernels/training_kernels.py, 2026-11)."""


def matmul(
    name: str, rows: float, inputs: float, outputs: float, *, compute: Compute, saved_bytes: float, experts: float = 0
) -> Operation:
    """[rows, inputs] x [inputs, outputs]; backward is two more, of which one adds to the weight's gradient.

    `experts`: so many matrices share the rows. The gradient is accumulated in fp32: 4 bytes read, 4 written
    (Megatron-LM gradient accumulation fusion).
    """
    size = 1 if compute == "fp8" else 4 if compute == "fp32" else 2
    flops = 2.0 * (rows + EXPERT_TILE_ROWS * experts) * inputs * outputs
    activations = size * rows * inputs + 2.0 * rows * outputs
    parameters = inputs * outputs * max(experts, 1)
    product = KernelWork(flops=flops, moved_bytes=activations + size * parameters)
    accumulate = KernelWork(flops=flops, moved_bytes=activations + 8.0 * parameters)
    return Operation(
        name=name,
        kind=OperationKind.MATMUL,
        forward=(product,),
        backward=(product, accumulate),
        saved_bytes=saved_bytes,
        output_bytes=2.0 * rows * outputs,
    )


def adapted(
    operations: tuple[Operation, ...], name: str, rows: float, inputs: float, outputs: float, job: TrainingJob, target: str
) -> tuple[Operation, ...]:
    """The product with its adapter: two thin products and a sum, whose FLOPs are nothing and whose traffic is not. The input is read once
    more; the adapter's output is written, read and added to the product's (going backward, the gradients of both join)."""
    if job.lora.rank is None or target not in job.lora.targets:
        return operations
    thin = KernelWork(flops=0.0, moved_bytes=2.0 * rows * (inputs + job.lora.rank))
    add = KernelWork(flops=0.0, moved_bytes=rows * 6.0 * outputs)
    join = KernelWork(flops=0.0, moved_bytes=rows * (4.0 * inputs + 2.0 * outputs))
    saved = 2.0 * rows * job.lora.rank
    return (
        *operations,
        Operation(
            name=f"{name} adapter", kind=OperationKind.MEMORY, forward=(thin, add), backward=(thin, thin, join), saved_bytes=saved
        ),
    )


def memory(
    name: str, elements: float, forward_bytes: float, backward_bytes: float, saved_bytes: float = 0.0, core: bool = False
) -> Operation:
    """A pass over `elements`; bytes are per element, each way."""
    return Operation(
        name=name,
        kind=OperationKind.MEMORY,
        forward=(KernelWork(flops=0.0, moved_bytes=elements * forward_bytes),),
        backward=(KernelWork(flops=0.0, moved_bytes=elements * backward_bytes),),
        saved_bytes=saved_bytes,
        core=core,
    )


def casts(name: str, compute: Compute, rows: float, inputs: float, outputs: float) -> tuple[Operation, ...]:
    """FP8 products read 8-bit copies: 16 bits are read for the largest value, read again and written in two 8-bit layouts, of
    the input going forward and of the output's gradient going backward (Transformer Engine, current scaling)."""
    if compute != "fp8":
        return ()
    cast = KernelWork(flops=0.0, moved_bytes=6.0 * rows * inputs)
    gradient = KernelWork(flops=0.0, moved_bytes=6.0 * rows * outputs)
    return (Operation(name=f"{name} cast", kind=OperationKind.MEMORY, forward=(cast,), backward=(gradient,)),)
