"""Time of one layer, the embedding and the head on one device for one micro-batch: a roofline per kernel plus collectives.

Every kernel takes the longer of its FLOPs at the measured rate of large matmuls and its traffic at the measured bandwidth.
How much of those rates a framework reaches is fitted to published runs (`tasks/plan/training/frameworks.toml`); the rest is counted.
"""

from __future__ import annotations

from collections.abc import Iterable

from windlass.core.hardware.spec import Hardware
from windlass.core.model import Attention, Frozen, LatentAttention, Layer, ModelSpec, MoE
from windlass.tasks.plan.training.frameworks import Efficiency, efficiency
from windlass.tasks.plan.training.job import TrainingJob
from windlass.tasks.plan.training.time.collectives import Links, group_of, links_of, remote_copies
from windlass.tasks.plan.training.work.attention import BF16
from windlass.tasks.plan.training.work.layers import (
    TENSOR_REGIONS,
    embedding_operations,
    head_operations,
    layer_operations,
    next_token_operations,
)
from windlass.tasks.plan.training.work.operation import KernelWork, Operation, OperationKind, by_operation

KERNEL_SECONDS = 3e-6
"""Added to every kernel (ai-dynamo/aiconfigurator systems/*.yaml)."""


class DeviceRates(Frozen):
    """Compute and bandwidth rates of one device and its links, for one compute type."""

    matmul_rate: float
    product_rate: float
    flash_forward_rate: float
    flash_backward_rate: float
    bandwidth: float
    small_bandwidth: float
    """Of memory-bound kernels, less where they are not fused: the same tensors pass more often."""
    links: Links
    devices_per_node: int
    ring: float = 1.0
    exposed: float = 0.0
    host_seconds: float = 0.0

    def seconds(self, work: KernelWork, rate: float) -> float:
        return (
            max(work.flops / rate, work.moved_bytes / (self.bandwidth if work.flops else self.small_bandwidth)) + KERNEL_SECONDS
        )


def device_rates(hardware: Hardware, compute: str, how: Efficiency | None = None) -> DeviceRates:
    """`how`: None for Megatron's."""
    device, how = hardware.devices[0], how or efficiency("megatron", False)
    ahead, back = how.of_flash(device)
    kind = "fp8" if compute == "fp8" else "bf16"
    slower = 2 if compute == "fp32" else 1  # TF32 tensor cores run at half the 16-bit rate (A100 and H100 data sheets)
    peak = device.flops["bf16"] / slower
    return DeviceRates(
        ring=how.ring,
        exposed=how.exposed,
        host_seconds=how.host_seconds,
        matmul_rate=device.matmul_flops(kind) * how.of_products(device, kind) / slower,
        product_rate=device.matmul_flops("bf16") * how.of_products(device, "bf16") / slower,
        flash_forward_rate=peak * ahead,
        flash_backward_rate=peak * back,
        bandwidth=device.measured_bandwidth,
        small_bandwidth=device.measured_bandwidth / how.passes,
        links=links_of(hardware),
        devices_per_node=hardware.devices_per_node,
    )


class LayerCost(Frozen):
    """Seconds, recomputation included, by cause; `forward`, `backward` and `weight` are the same time by phase."""

    compute: float = 0.0
    memory: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    """The part of `backward` that computes weight gradients, which some schedules defer."""

    def plus(self, other: LayerCost, times: float = 1.0) -> LayerCost:
        return LayerCost(**{name: getattr(self, name) + times * getattr(other, name) for name in LayerCost.__struct_fields__})

    @property
    def total(self) -> float:
        return self.forward + self.backward


class KernelSeconds(Frozen):
    """Seconds of a list of operations without any communication."""

    forward_compute: float
    forward_memory: float
    backward_compute: float
    backward_memory: float
    again_compute: float
    again_memory: float
    weight: float
    core: float
    """Attention core in the forward pass, which context-parallel transfers overlap with."""


def kernels(operations: Iterable[Operation], job: TrainingJob, rates: DeviceRates, *, repeats: bool = True) -> KernelSeconds:
    """`repeats`: recomputation applies to these (it never does to the head)."""
    sums = dict.fromkeys(KernelSeconds.__struct_fields__, 0.0)
    started = dict.fromkeys(("forward", "backward", "again"), 0.0)
    for operation in operations:
        where = "memory" if operation.kind is OperationKind.MEMORY else "compute"
        ahead = sum(rates.seconds(work, _rate(operation, job, rates, True)) for work in operation.forward)
        going_back = operation.backward[:1] if _is_frozen(operation, job) else operation.backward
        back = [rates.seconds(work, _rate(operation, job, rates, False)) for work in going_back]
        sums[f"forward_{where}"] += ahead
        sums[f"backward_{where}"] += sum(back)
        started["forward"] += len(operation.forward)
        started["backward"] += len(back)
        started["again"] += len(operation.forward) * (_again(operation, job) if repeats else 0.0)
        if repeats:
            sums[f"again_{where}"] += ahead * _again(operation, job)
        if operation.kind is OperationKind.MATMUL:
            sums["weight"] += back[-1]
        if operation.core or operation.kind in (OperationKind.FLASH, OperationKind.PRODUCT):
            sums["core"] += ahead
    for phase, count in started.items():
        busy = sums[f"{phase}_compute"] + sums[f"{phase}_memory"]
        sums[f"{phase}_memory"] += max(0.0, count * rates.host_seconds - busy)  # the device waits for the host
    return KernelSeconds(**sums)


def _is_frozen(operation: Operation, job: TrainingJob) -> bool:
    """Frozen weights need only the input gradient; the FLOPs of adapters are negligible."""
    return job.lora.rank is not None and operation.kind is OperationKind.MATMUL


def _rate(operation: Operation, job: TrainingJob, rates: DeviceRates, forward: bool) -> float:
    if operation.kind is OperationKind.FLASH:
        return (rates.flash_forward_rate if forward else rates.flash_backward_rate) / (rates.ring if job.groups.cp > 1 else 1.0)
    return rates.product_rate if operation.kind is OperationKind.PRODUCT else rates.matmul_rate


def _again(operation: Operation, job: TrainingJob) -> float:
    """Share of the operation that is computed again."""
    if by_operation(job):
        return {OperationKind.MATMUL: 1 - job.kept_products, OperationKind.MEMORY: 1.0}.get(operation.kind, 0.0)
    if job.recompute == "selective":
        return float(operation.core or operation.kind is OperationKind.PRODUCT)
    return float(job.recompute == "full")


class ExposedTime(Frozen):
    """Seconds of communication that is not overlapped."""

    forward: float = 0.0
    backward: float = 0.0


def layer_cost(spec: ModelSpec, layer: Layer, job: TrainingJob, rates: DeviceRates) -> LayerCost:
    times = kernels(layer_operations(spec, layer, job), job, rates)
    tensor = _tensor_exposed(_regions(spec, layer), spec.hidden_size, times, job, rates)
    context = _context_exposed(layer, times, job, rates)
    experts = _expert_exposed(spec, layer, times, job, rates)
    return _assemble(times, tensor, context, experts, repeats=job.recompute == "full")


def ends_cost(spec: ModelSpec, job: TrainingJob, rates: DeviceRates, *, first: bool, last: bool) -> LayerCost:
    """The embedding on the first stage; the head, its loss and the multi-token-prediction layer on the last."""
    cost = LayerCost()
    if first:
        times = kernels(embedding_operations(spec, job), job, rates, repeats=False)
        cost = cost.plus(
            _assemble(
                times, _tensor_exposed((spec.hidden_size,), spec.hidden_size, times, job, rates), ExposedTime(), ExposedTime()
            )
        )
    if last:
        operations = (*head_operations(spec, job), *next_token_operations(spec, job))
        times = kernels(operations, job, rates, repeats=False)
        regions = (spec.hidden_size,) * (4 if job.next_token and spec.next_token else 1)
        cost = cost.plus(
            _assemble(times, _tensor_exposed(regions, spec.hidden_size, times, job, rates), ExposedTime(), ExposedTime())
        )
    return cost


def _assemble(
    times: KernelSeconds, tensor: ExposedTime, context: ExposedTime, experts: ExposedTime, repeats: bool = False
) -> LayerCost:
    """Full recomputation runs the forward's collectives once more."""
    once_more = 2 if repeats else 1
    ahead = tensor.forward + context.forward + experts.forward
    return LayerCost(
        compute=times.forward_compute + times.backward_compute + times.again_compute,
        memory=times.forward_memory + times.backward_memory + times.again_memory,
        tp=once_more * tensor.forward + tensor.backward,
        cp=once_more * context.forward + context.backward,
        ep=once_more * experts.forward + experts.backward,
        forward=times.forward_compute + times.forward_memory + ahead,
        backward=times.backward_compute
        + times.backward_memory
        + times.again_compute
        + times.again_memory
        + tensor.backward
        + context.backward
        + experts.backward
        + (once_more - 1) * ahead,
        weight=times.weight,
    )


def _regions(spec: ModelSpec, layer: Layer) -> tuple[int, ...]:
    """Width gathered on entry to each tensor-parallel region of the layer; routed experts alone have none."""
    mixer = layer.mixer
    width = spec.hidden_size
    if isinstance(mixer, LatentAttention) and mixer.q_lora_rank:
        width = mixer.q_lora_rank + mixer.kv_lora_rank + mixer.rope_head_dim
    alone = isinstance(layer.feed_forward, MoE) and not layer.feed_forward.shared_intermediate_size
    return (width,) if alone or TENSOR_REGIONS[layer.wiring] == 1 else (width, spec.hidden_size)


def _tensor_exposed(
    regions: tuple[int, ...], hidden: int, times: KernelSeconds, job: TrainingJob, rates: DeviceRates
) -> ExposedTime:
    """Without sequence parallelism: an all-reduce after the region, and one of the gradient before it. With it: an all-gather before
    and a reduce-scatter after, both mirrored in the backward, and a second all-gather of the sharded input (arXiv 2205.05198, 4.2.2)."""
    tp, tokens = job.groups.tp, job.micro_tokens
    if tp == 1:
        return ExposedTime()
    group, links = group_of(tp, 1, rates.devices_per_node), rates.links
    wide = len(regions) * links.gather(BF16 * tokens * hidden, group)
    into = sum(links.gather(BF16 * tokens * width, group) for width in regions)
    if job.sequence_parallel:
        forward, open_backward, beside = into + wide, wide, 2 * into
    else:
        forward, open_backward, beside = 2 * wide, 0.0, 2 * into
    if job.overlap.tp == "none":
        return ExposedTime(forward=forward, backward=open_backward + beside)
    hidden_backward = max(0.0, beside - times.backward_compute)
    if job.overlap.tp == "backward":
        return ExposedTime(forward=forward, backward=open_backward + hidden_backward)
    return ExposedTime(
        forward=_pipelined(forward, times.forward_compute, tp),
        backward=_pipelined(open_backward + beside, times.backward_compute, tp),
    )


def _pipelined(communication: float, computation: float, pieces: int) -> float:
    """Split in `pieces` and overlapped with the matmuls: one piece is exposed."""
    return max(communication / pieces, communication - computation)


def _context_exposed(layer: Layer, times: KernelSeconds, job: TrainingJob, rates: DeviceRates) -> ExposedTime:
    """Ring attention: keys and values are passed around overlapped with the attention core, and back with their gradients (arXiv 2310.01889)."""
    groups, mixer = job.groups, layer.mixer
    if groups.cp == 1:
        return ExposedTime()
    heads = max(mixer.num_kv_heads / groups.tp, 1) * 2 * mixer.head_dim if isinstance(mixer, Attention) else mixer.kv_elements
    group = group_of(groups.cp, groups.tp, rates.devices_per_node)
    moved = rates.links.gather(BF16 * job.micro_tokens * groups.cp * heads, group)
    return ExposedTime(forward=max(0.0, moved - times.core), backward=max(0.0, 2 * moved - 2 * times.core))


def _expert_exposed(spec: ModelSpec, layer: Layer, times: KernelSeconds, job: TrainingJob, rates: DeviceRates) -> ExposedTime:
    """Dispatch and combine, forward and backward; and the gather among ranks that share an expert."""
    groups, moe = job.groups, layer.feed_forward
    if not isinstance(moe, MoE) or groups.ep * groups.expert_tp == 1:
        return ExposedTime()
    width = BF16 * spec.hidden_size
    own = job.micro_tokens / groups.tp * moe.num_active * width
    group = group_of(groups.ep, groups.expert_tp, rates.devices_per_node)
    once = rates.links.exchange(own, group, _remote_share(moe, job, group.size // group.local))
    sharers = group_of(groups.expert_tp, 1, rates.devices_per_node)
    once += rates.links.gather(own * groups.expert_tp, sharers)
    forward = 2 * once
    if not job.overlap.ep:
        return ExposedTime(forward=forward, backward=forward)
    beside = times.forward_compute + times.backward_compute + times.forward_memory + times.backward_memory
    left = max(0.0, 2 * forward - beside) / 2
    return ExposedTime(forward=left, backward=left)


def _remote_share(moe: MoE, job: TrainingJob, num_nodes: int) -> float | None:
    if job.dispatch != "per_node" or num_nodes <= 1:
        return None
    limit = moe.router.num_chosen_groups if moe.router.num_groups > 1 else None
    return remote_copies(num_nodes, moe.num_active, limit) / moe.num_active
