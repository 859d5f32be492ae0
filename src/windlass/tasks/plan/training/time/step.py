"""Time of one optimizer step by cause: layers, pipeline, data-parallel communication, optimizer.

Predicted from the model's shapes and the device's measured rates; docs/reference/plan.md compares it with published runs.
"""

from __future__ import annotations

from windlass.core.hardware.spec import Hardware
from windlass.core.model import Frozen, ModelSpec
from windlass.tasks.plan.training.job import TrainingJob
from windlass.tasks.plan.training.memory.states import MOMENTS, Elements, ParameterBytes, gathered_weight_bytes, job_bytes
from windlass.tasks.plan.training.time.collectives import group_of
from windlass.tasks.plan.training.time.layer import DeviceRates, LayerCost
from windlass.tasks.plan.training.work.attention import BF16

SHOWN_TRANSFERS = 0.25
"""Of transfers between stages that are overlapped. Chosen, not fitted: NeMo's rows of 5 to 20 virtual stages were up to 4 % nearer with it."""


class TrainingStepTime(Frozen):
    """Seconds; the parts add up to `step_seconds`."""

    compute: float
    """Matrix products and attention, recomputation included."""
    memory: float
    """Memory-bound kernels: norms, activations, residuals, the loss, permutations, casts."""
    tp: float
    cp: float
    ep: float
    pp_bubble: float
    pp_transfer: float
    dp: float
    optimizer: float

    @property
    def step_seconds(self) -> float:
        return sum(getattr(self, name) for name in self.__struct_fields__)


class StageCosts(Frozen):
    """Of every pipeline rank, one micro-batch."""

    costs: tuple[LayerCost, ...]

    @property
    def slowest(self) -> LayerCost:
        return max(self.costs, key=lambda cost: cost.total)

    @property
    def total(self) -> float:
        return sum(cost.total for cost in self.costs)


def assemble_step(
    spec: ModelSpec, hardware: Hardware, job: TrainingJob, rates: DeviceRates, costs: StageCosts, elements: Elements
) -> TrainingStepTime:
    slowest, batches = costs.slowest, job.num_micro_batches
    return TrainingStepTime(
        compute=batches * slowest.compute,
        memory=batches * slowest.memory + accumulation_seconds(job, rates, elements),
        tp=batches * slowest.tp,
        cp=batches * slowest.cp,
        ep=batches * slowest.ep,
        pp_bubble=bubble_seconds(job, costs),
        pp_transfer=transfer_seconds(spec, job, rates, slowest),
        dp=data_parallel_seconds(spec, job, rates, slowest, elements),
        optimizer=optimizer_seconds(spec, hardware, job, rates, elements),
    )


def bubble_seconds(job: TrainingJob, costs: StageCosts) -> float:
    """1F1B: one micro-batch of the other stages, divided by v with interleaving: (p-1)/v of a stage (arXiv 2104.04473, 2.2).
    Zero-bubble ZB-H1 (p-1)(F + B - 2W); DualPipe (p/2 - 1)(F&B + B - 3W) (arXiv 2401.10241; arXiv 2412.19437, table 2;
    B there is the whole backward, F&B a forward and a backward run together)."""
    slowest, pp = costs.slowest, job.groups.pp
    if pp == 1:
        return 0.0
    if job.schedule == "zero_bubble":
        return (pp - 1) * max(0.0, slowest.total - 2 * slowest.weight)
    if job.schedule == "dualpipe":
        return (pp / 2 - 1) * max(0.0, slowest.total + slowest.backward - 3 * slowest.weight)
    return (costs.total - slowest.total) / job.virtual_stages


def transfer_seconds(spec: ModelSpec, job: TrainingJob, rates: DeviceRates, slowest: LayerCost) -> float:
    """Activations and their gradients between stages, once per virtual stage; each tensor-parallel rank sends its share
    (arXiv 2104.04473, 4.1). Overlapped ones still delay the filling and draining of the pipeline, and show if the link is too slow; and
    a share of them shows all the same, which is what every further virtual stage costs."""
    groups = job.groups
    if groups.pp == 1:
        return 0.0
    inside = groups.world <= rates.devices_per_node
    once = rates.links.send(BF16 * job.micro_tokens / groups.tp * spec.hidden_size, inside)
    filling = 2 * (groups.pp - 1) * once
    each = 2 * job.virtual_stages * once
    shown = max(SHOWN_TRANSFERS * each, each - slowest.total) if job.overlap.pp else each
    return filling + job.num_micro_batches * shown


def data_parallel_seconds(spec: ModelSpec, job: TrainingJob, rates: DeviceRates, slowest: LayerCost, elements: Elements) -> float:
    """All-reduce of gradients (ZeRO-0), or reduce-scatter and all-gather of new weights (ZeRO-1); ZeRO-2 reduce-scatters every micro-batch,
    ZeRO-3 also gathers the weights for each forward and backward (arXiv 1910.02054, 7). Overlap hides the scatter behind a backward and the
    gather behind a forward, but for one layer's share (Megatron-Bridge performance guide: first and last micro-batch)."""
    gathered, scattered = _exchanges(spec, job, rates, elements)
    share = rates.exposed
    if job.zero == 0:
        return _hidden(2 * scattered, slowest.backward, spec, job, share)
    if job.zero == 3:
        ahead, back = (
            _hidden(gathered, slowest.forward, spec, job, share),
            _hidden(gathered + scattered, slowest.backward, spec, job, share),
        )
        return job.num_micro_batches * (ahead + back) + _between_copies(spec, job, rates, slowest, elements)
    times = job.num_micro_batches if job.zero == 2 else 1
    return _hidden(gathered, slowest.forward, spec, job, share) + times * _hidden(scattered, slowest.backward, spec, job, share)


def _between_copies(spec: ModelSpec, job: TrainingJob, rates: DeviceRates, slowest: LayerCost, elements: Elements) -> float:
    """Hybrid sharding: copies of the shards agree on their gradients once per step, behind the last backward."""
    copies = job.groups.dp * job.groups.cp // job.dense_shards
    if copies == 1:
        return 0.0
    group = group_of(copies, job.groups.tp * job.dense_shards, rates.devices_per_node)
    owned = job_bytes(job).gradients * owned_elements(job, elements)
    return _hidden(rates.links.all_reduce(owned, group), slowest.backward, spec, job, rates.exposed)


def _exchanges(spec: ModelSpec, job: TrainingJob, rates: DeviceRates, elements: Elements) -> tuple[float, float]:
    """Seconds to all-gather all weights of a rank, and to reduce-scatter its gradients: dense ones and experts in their own groups,
    one collective per layer, so that each can start when its layer is done."""
    groups = job.groups
    dense = group_of(job.dense_shards, groups.tp, rates.devices_per_node)
    expert = group_of(job.expert_shards, groups.expert_tp * groups.ep, rates.devices_per_node)
    each = ParameterBytes(weights=gathered_weight_bytes(job), gradients=job_bytes(job).gradients, optimizer=0.0)
    links, layers = rates.links, layers_per_stage(spec, job)
    gathered = links.gather(elements.dense * each.weights, dense, layers) + links.gather(
        elements.experts * each.weights, expert, layers
    )
    scattered = links.gather(elements.dense * each.gradients, dense, layers)
    scattered += links.gather(elements.experts * each.gradients, expert, layers)
    return gathered, scattered


def _hidden(communication: float, computation: float, spec: ModelSpec, job: TrainingJob, share: float) -> float:
    """`share` of what could be hidden shows all the same: collectives take multiprocessors and bandwidth from the kernels beside them,
    and start late."""
    if not job.overlap.dp:
        return communication
    behind = min(communication, computation)
    return max(communication / layers_per_stage(spec, job), communication - behind + share * behind)


def layers_per_stage(spec: ModelSpec, job: TrainingJob) -> int:
    return max(spec.num_layers // job.groups.pp, 1)


def accumulation_seconds(job: TrainingJob, rates: DeviceRates, elements: Elements) -> float:
    """A 16-bit gradient read and the fp32 sum read and written, every micro-batch; the first only writes. The product that made the
    gradient is counted as if it had written fp32 already."""
    if not job.accumulates_apart:
        return 0.0
    held = elements.total if job.zero < 2 else owned_elements(job, elements)
    return (10.0 * job.num_micro_batches - 4.0) * held / rates.bandwidth


def optimizer_seconds(spec: ModelSpec, hardware: Hardware, job: TrainingJob, rates: DeviceRates, elements: Elements) -> float:
    """Traffic of the update over the parameters a rank owns: gradient read twice (norm, update) 8, fp32 weight read and written 8,
    each moment 8, new 16-bit weight written 2; and 4 to clear every gradient it holds."""
    owned = owned_elements(job, elements)
    if job.offload != "none":
        return _host_update_seconds(hardware, job, owned)
    update = owned * (18.0 + 8.0 * MOMENTS[job.optimizer])
    return (update + 4.0 * elements.total) / rates.bandwidth + _orthogonalize_seconds(spec, job, rates, owned)


def owned_elements(job: TrainingJob, elements: Elements) -> float:
    if job.zero == 0:
        return elements.total
    return elements.dense / job.dense_shards + elements.experts / job.expert_shards


def _orthogonalize_seconds(spec: ModelSpec, job: TrainingJob, rates: DeviceRates, owned: float) -> float:
    """Muon's five Newton-Schulz iterations: per matrix [a, b], a <= b, 5 (4 a^2 b + 2 a^3) operations, so at most 30 a per parameter
    with a = hidden (github.com/KellerJordan/Muon)."""
    return 30.0 * spec.hidden_size * owned / rates.product_rate if job.optimizer == "muon" else 0.0


def _host_update_seconds(hardware: Hardware, job: TrainingJob, owned: float) -> float:
    """The optimizer on the host: gradients down and weights up the host link, states through host memory, which the node's
    devices share; with NVMe every state is read and written once more on disk. DeepSpeed moves 2 bytes each way, Megatron-Core
    fp32 gradients down and weights, cast on the host, up."""
    node = hardware.nodes[0]
    share = len(node.devices)
    moved = 6.0 if job.groups.tp * job.groups.pp > 1 else 4.0
    link = moved * owned / node.devices[0].host_bandwidth
    states = owned * (18.0 + 8.0 * MOMENTS[job.optimizer])
    update = states * share / node.ram_bandwidth
    disk = 2 * owned * (4.0 + 4.0 * MOMENTS[job.optimizer]) * share / node.disk_bandwidth if job.offload == "nvme" else 0.0
    return link + update + disk
