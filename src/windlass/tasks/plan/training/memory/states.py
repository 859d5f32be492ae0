"""Model states (weights, gradients, optimizer) of one device, from the tensor rules. Knows no activations and no time.

Dense tensors are sharded over tp and, by ZeRO, over dp * cp; routed experts over ep * expert_tp and expert-dp
(Megatron-Core theoretical_memory_usage.py: `num_bytes_per_parameter(expert_data_parallel_size)`).
"""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from windlass.core.model import Frozen, ModelSpec
from windlass.core.place import WHOLE
from windlass.core.recipe.sections import Compute, GradientType, LoraSection, OptimizerName, StateType
from windlass.core.rule import AxisName, ModelPart, Role, Rule
from windlass.core.scheme import scheme
from windlass.tasks.plan.training.job import TrainingJob
from windlass.tasks.plan.training.stages import Stage

MOMENTS = {"adamw": 2, "muon": 1, "sgd": 1}
"""fp32 optimizer tensors per weight: two moments, or one momentum (Muon: github.com/KellerJordan/Muon)."""


class ParameterBytes(Frozen):
    """Bytes per parameter before sharding."""

    weights: float
    gradients: float
    optimizer: float
    """fp32 master weights (if compute is 16-bit), moments, and an fp32 copy of 16-bit gradients."""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


STATE_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0}


def parameter_bytes(
    compute: Compute = "bf16",
    gradients: GradientType = "fp32",
    optimizer: OptimizerName = "adamw",
    states: StateType = "fp32",
) -> ParameterBytes:
    """Megatron-LM docs/user-guide/features/dist_optimizer.md: fp16/fp16 2+2+16, bf16/fp32 2+4+12, fp32/fp32 4+4+8. States in fewer bits
    have neither fp32 weights nor fp32 copies of gradients: 2+2+4 in bf16, 2+2+2 in 8 bits (bitsandbytes, torchao)."""
    weights = 4.0 if compute == "fp32" else 2.0
    held = 4.0 if gradients == "fp32" else 2.0
    master = 0.0 if compute == "fp32" else 4.0
    copied = 4.0 if gradients == "fp16" else 0.0  # bf16 gradients are added to fp32 weights as they are
    if states != "fp32":
        return ParameterBytes(weights=weights, gradients=held, optimizer=STATE_BYTES[states] * MOMENTS[optimizer])
    return ParameterBytes(weights=weights, gradients=held, optimizer=master + copied + 4.0 * MOMENTS[optimizer])


def job_bytes(job: TrainingJob) -> ParameterBytes:
    """FSDP keeps its shards in fp32 and gathers 16-bit copies, so that there are no 16-bit weights beside them: 4 + 4 + 8."""
    each = parameter_bytes(job.compute, job.gradients, job.optimizer, job.states)
    if job.framework != "pytorch" or job.zero != 3 or job.states != "fp32" or job.compute == "fp32" or job.offload != "none":
        return each
    return ParameterBytes(weights=4.0, gradients=each.gradients, optimizer=each.optimizer - 4.0)


def spread_bytes(each: ParameterBytes, zero: int, ranks: int) -> ParameterBytes:
    """ZeRO over `ranks`: 18; 6 + 12/d; 2 + 16/d; 18/d for bf16 weights, fp32 gradients and AdamW (arXiv 1910.02054, figure 1)."""
    return ParameterBytes(
        weights=each.weights / (ranks if zero >= 3 else 1),
        gradients=each.gradients / (ranks if zero >= 2 else 1),
        optimizer=each.optimizer / (ranks if zero >= 1 else 1),
    )


class Elements(Frozen):
    """Trainable parameters of one rank of a stage, before ZeRO."""

    dense: float
    experts: float
    matrices: float
    """The part of `dense` and `experts` that is layer matrices: what papers' formulas count (12 h^2 L)."""
    frozen_bytes: float = 0.0
    """Of frozen dense weights with LoRA, before ZeRO-3."""
    frozen_expert_bytes: float = 0.0
    ends: float = 0.0
    """The embedding's and the head's part of all weights, trained or frozen: FSDP gathers them as a unit of their own."""
    layers: float = 0.0
    """All weights of the stage's layers, trained or frozen."""

    @property
    def total(self) -> float:
        return self.dense + self.experts


def stage_elements(spec: ModelSpec, rules: tuple[Rule, ...], job: TrainingJob, stage: Stage) -> Elements:
    dense = experts = matrices = frozen = frozen_experts = ends = layers = 0.0
    for rule in rules:
        held = _held(spec, rule, stage, job)
        if not held:
            continue
        elements = held * _local_elements(rule, job)
        if rule.layers is None:
            ends += elements
        else:
            layers += elements
        if job.lora.rank is not None:
            frozen_bytes = elements * _frozen_bytes(rule, job.lora)
            frozen, frozen_experts = (
                (frozen, frozen_experts + frozen_bytes) if rule.num_experts else (frozen + frozen_bytes, frozen_experts)
            )
            elements *= adapter_elements(rule, job.lora) / rule.elements
        if rule.num_experts:
            experts += elements
        else:
            dense += elements
        if rule.role is Role.MATRIX:
            matrices += elements
    return Elements(
        dense=dense,
        experts=experts,
        matrices=matrices,
        frozen_bytes=frozen,
        frozen_expert_bytes=frozen_experts,
        ends=ends,
        layers=layers,
    )


def adapter_elements(rule: Rule, lora: LoraSection) -> int:
    """Elements of the LoRA matrices A and B for one matrix (arXiv 2106.09685, 4.1); 0 if it is not a target."""
    if rule.role is not Role.MATRIX or rule.part is ModelPart.NEXT_TOKEN or rule.ours.endswith("router.weight"):
        return 0
    target = "experts" if rule.num_experts else "attention" if ".mixer." in rule.ours else "feed_forward"
    return (lora.rank or 0) * sum(rule.shape) if target in lora.targets else 0


def _frozen_bytes(rule: Rule, lora: LoraSection) -> float:
    """Bytes per element: matrices as conversion stores them (groups of 128 with a scale), the rest in 16 bits."""
    how = scheme(lora.base)
    stored = how.stored(rule.keep, rule.shape[-1], is_head=rule.role is Role.HEAD) if len(rule.shape) == 2 else None
    return 2.0 if stored is None or stored.bits >= 16 else stored.matrix_bytes(*rule.shape) / rule.elements


def _held(spec: ModelSpec, rule: Rule, stage: Stage, job: TrainingJob) -> int:
    """How many copies of the tensor (one per layer) the stage holds. A head that the checkpoint stores twice counts once."""
    if rule.copy_of is not None:
        return 0
    if rule.part is ModelPart.NEXT_TOKEN:
        return int(job.next_token and stage.has_head) * len(rule.layers or (0,))
    if rule.layers is not None:
        return bisect_left(rule.layers, stage.layers.stop) - bisect_left(rule.layers, stage.layers.start)
    if rule.role is Role.LOOKUP:
        both_ends = spec.tied_head and stage.has_head and rule.axes[0].name is AxisName.VOCAB
        return int(stage.has_embedding or both_ends)  # tied embeddings are needed at both ends of a pipeline
    return int(stage.has_head)


def _local_elements(rule: Rule, job: TrainingJob) -> float:
    """Per layer and rank: experts over ep and expert_tp, the rest over tp; KV heads are replicated if there are fewer than tp."""
    groups = job.groups
    elements = float(rule.elements)
    if rule.num_experts:
        return elements * rule.num_experts / (groups.ep * groups.expert_tp if _is_cut(rule) else groups.ep)
    for axis in rule.axes:
        if axis.name is AxisName.KV_HEADS:
            return elements / min(groups.tp, axis.count)
        if axis.name not in WHOLE:
            return elements / groups.tp
    return elements


def _is_cut(rule: Rule) -> bool:
    return any(axis.name not in WHOLE for axis in rule.axes)


class StateBytes(Frozen):
    """Model states of one rank."""

    weights: float
    gradients: float
    optimizer: float
    working: float = 0.0
    """The gathered layer, under ZeRO-2 and ZeRO-3."""
    host: float = 0.0
    """Offloaded to host memory, per device."""
    disk: float = 0.0

    @property
    def device(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.working


def stage_states_of(elements: Elements, job: TrainingJob, stage: Stage) -> StateBytes:
    copies = 2 if job.schedule == "dualpipe" else 1  # every rank holds two stages (arXiv 2412.19437, table 2: parameters 2x)
    states = states_of(elements, job, copies)
    return states if job.zero < 2 else _gathered(states, elements, job, stage)


def states_of(elements: Elements, job: TrainingJob, copies: int = 1) -> StateBytes:
    each = job_bytes(job)
    dense = spread_bytes(each, job.zero, job.dense_shards)
    expert = spread_bytes(each, job.zero, job.expert_shards)
    weights = copies * (elements.dense * dense.weights + elements.experts * expert.weights)
    gradients = elements.dense * dense.gradients + elements.experts * expert.gradients
    optimizer = elements.dense * dense.optimizer + elements.experts * expert.optimizer
    learning = _offloaded(StateBytes(weights=weights, gradients=gradients, optimizer=optimizer), job)
    return msgspec.structs.replace(learning, weights=learning.weights + _frozen(elements, job))


def _frozen(elements: Elements, job: TrainingJob) -> float:
    """Frozen weights are sharded like trained ones: only ZeRO-3 spreads them."""
    if job.zero < 3:
        return elements.frozen_bytes + elements.frozen_expert_bytes
    return elements.frozen_bytes / job.dense_shards + elements.frozen_expert_bytes / job.expert_shards


def _gathered(states: StateBytes, elements: Elements, job: TrainingJob, stage: Stage) -> StateBytes:
    """One layer is gathered while it is used: under ZeRO-3 its weights and their gradient in 16 bits, 4 bytes per parameter
    (DeepSpeed stage3.py `estimate_zero3_model_states_mem_needs`), under ZeRO-2 its gradient. Uses the mean layer of the stage.

    FSDP2 gathers the next layer meanwhile, and keeps embedding and head gathered: they are the root unit."""
    trains = job.lora.rank is None
    if job.zero < 3:
        each = parameter_bytes(job.compute, job.gradients, job.optimizer).gradients
        return msgspec.structs.replace(states, working=each * elements.total / max(stage.num_layers, 1))
    weights = gathered_weight_bytes(job)
    layer = elements.layers / max(stage.num_layers, 1)
    ends = weights * elements.ends if job.framework == "pytorch" else 0.0
    units = 2.0 if job.framework == "pytorch" else 1.0
    if job.framework != "pytorch":
        layer += elements.ends / max(stage.num_layers, 1)
    return msgspec.structs.replace(states, working=(units * weights + 2.0 * trains) * layer + ends)


def gathered_weight_bytes(job: TrainingJob) -> float:
    """Weights are gathered in 16 bits; frozen quantized ones as they are stored."""
    if job.lora.rank is not None and job.lora.base != "bf16":
        return 1.1 if job.lora.base == "int8" else 0.6
    return 4.0 if job.compute == "fp32" else 2.0


HOST_BUFFER = 1.5
"""DeepSpeed's own factor on offloaded bytes, for buffers (stage3.py, `additional_buffer_factor`)."""


def _offloaded(states: StateBytes, job: TrainingJob) -> StateBytes:
    """DeepSpeed: gradients and optimizer states leave the device; under ZeRO-3 the weights too. The optimizer runs on the host.
    NVMe takes the optimizer states and, under ZeRO-3, the weights; gradients pass through host buffers."""
    if job.offload == "none":
        return states
    if job.groups.tp * job.groups.pp > 1:
        return _optimizer_on_host(states, job)
    moved_weights = states.weights if job.zero >= 3 else 0.0
    away = states.optimizer + moved_weights
    on_disk = job.offload == "nvme"
    return StateBytes(
        weights=states.weights - moved_weights,
        gradients=0.0,
        optimizer=0.0,
        host=HOST_BUFFER * (states.gradients + (0.0 if on_disk else away)),
        disk=away if on_disk else 0.0,
    )


def _optimizer_on_host(states: StateBytes, job: TrainingJob) -> StateBytes:
    """Megatron-Core (optimizer/cpu_offloading/hybrid_optimizer.py, everything offloaded): fp32 weights, moments and a pinned fp32
    copy of the gradients a rank owns are on the host; weights and the gradient buffer stay."""
    each = job_bytes(job).optimizer
    return msgspec.structs.replace(states, optimizer=0.0, host=states.optimizer * (each + 4.0) / each)
