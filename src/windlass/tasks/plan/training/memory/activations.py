"""Activation memory: bytes kept from forward to backward on the fullest device. Knows no model states and no time.

Sums over operations (`work.layers`), times the micro-batches in flight. For a GPT layer the sums are exactly those of
arXiv 2205.05198, table 2: sbh (10 + 24/t + 5as/ht); sbh/t (34 + 5as/h) with sequence parallelism; 34 sbh/t with selective
recomputation; 2 sbh with full recomputation.
"""

from __future__ import annotations

from collections.abc import Iterable

from windlass.core.model import Layer, ModelSpec
from windlass.tasks.plan.training.job import TrainingJob
from windlass.tasks.plan.training.work.attention import BF16
from windlass.tasks.plan.training.work.layers import layer_operations
from windlass.tasks.plan.training.work.operation import Operation, OperationKind, by_operation


def saved_bytes(operations: Iterable[Operation], job: TrainingJob) -> float:
    """For one layer and one micro-batch."""
    if by_operation(job):
        return kept_outputs(operations, job.kept_products)
    if job.recompute == "none":
        return sum(operation.saved_bytes for operation in operations)
    return sum(operation.saved_bytes for operation in operations if not operation.core)


def kept_outputs(operations: Iterable[Operation], share: float) -> float:
    """Recomputation per operation keeps a share of the products' outputs, and attention's."""
    products = attention = 0.0
    for operation in operations:
        if operation.kind is OperationKind.MATMUL:
            products += operation.output_bytes
        attention += operation.output_bytes if operation.kind is OperationKind.FLASH else 0.0
    return share * products + attention


def layer_bytes(spec: ModelSpec, layer: Layer, job: TrainingJob) -> float:
    if job.recompute == "full":
        return BF16 * job.outside_tokens * spec.hidden_size  # the layer's input
    first = BF16 * job.outside_tokens * spec.hidden_size if by_operation(job) else 0.0  # the layer's input
    return first + saved_bytes(layer_operations(spec, layer, job), job)


def recomputed_bytes(spec: ModelSpec, layer: Layer, job: TrainingJob) -> float:
    """Recomputed activations of one layer during its backward, beyond those it kept."""
    if job.recompute == "none":
        return 0.0
    operations = layer_operations(spec, layer, job)
    whole = job.recompute == "full" or by_operation(job)
    return sum(operation.saved_bytes for operation in operations if whole or operation.core)


def in_flight(job: TrainingJob, stage_index: int) -> float:
    """Peak number of micro-batches in flight on a stage.

    1F1B: pp on the first stage and one fewer on each later one. Interleaving adds (p - 1) / (p v) of that on the first
    (arXiv 2205.05198, 4.2.3: L (1 + (p-1)/pv)). DualPipe: pp + 1 on every rank (arXiv 2412.19437, table 2).
    """
    pp, virtual, available = job.groups.pp, job.virtual_stages, float(job.num_micro_batches)
    if job.schedule == "dualpipe":
        return min(pp + 1.0, available)
    if virtual == 1:
        return min(float(pp - stage_index), available)
    chunks = pp * virtual + pp - 1 - 2 * stage_index  # warmup of the interleaved schedule plus the current one
    return min(chunks / virtual, available)
