"""Memory of many candidate jobs of one model, with cached parts. Knows no device capacity."""

from __future__ import annotations

from windlass.core.model import Frozen, ModelSpec
from windlass.core.rule import Rule
from windlass.tasks.plan.training.frameworks import efficiency_of
from windlass.tasks.plan.training.job import TrainingJob
from windlass.tasks.plan.training.memory.activations import in_flight, layer_bytes, recomputed_bytes
from windlass.tasks.plan.training.memory.states import Elements, StateBytes, stage_elements, stage_states_of
from windlass.tasks.plan.training.stages import Stage, layer_kinds, stages
from windlass.tasks.plan.training.work.layers import embedding_operations, head_operations, next_token_operations

CONTEXT_BYTES = 943_000_000
"""CUDA context and libraries 551 MB, NCCL buffers 392 MB for 4 to 8 devices (ai-dynamo/aiconfigurator systems/*.yaml)."""


class DeviceBytes(Frozen):
    """Of the fullest device."""

    states: StateBytes
    activations: float
    overhead: float

    @property
    def total(self) -> float:
        return self.states.device + self.activations + self.overhead


class KeptActivations(Frozen):
    """Activation bytes, which depend only on the degrees within a stage."""

    layers: tuple[float, ...]
    """Of each kind of layer."""
    working: float
    embedding: float
    head: float


LayerKey = tuple[int, int, int, int, int, str]
Contents = tuple[tuple[int, ...], bool, bool]
"""Of a stage: layers of each kind, embedding, head."""


def layer_key(job: TrainingJob) -> LayerKey:
    groups = job.groups
    return groups.tp, groups.cp, groups.ep, groups.expert_tp, job.micro_batch, job.recompute


class Footprints:
    """Caches for the jobs of one recipe: sequence length, types, optimizer and offload must be the same."""

    def __init__(self, spec: ModelSpec, rules: tuple[Rule, ...]) -> None:
        self.spec, self.rules = spec, rules
        self.kinds, self.numbers = layer_kinds(spec)
        self._kept: dict[LayerKey, KeptActivations] = {}
        self._stages: dict[int, tuple[Stage, ...]] = {}
        self._contents: dict[int, tuple[Contents, ...]] = {}
        self._representatives: dict[int, tuple[int, ...]] = {}
        self._elements: dict[tuple[int, ...], tuple[Elements, ...]] = {}
        self._memory: dict[tuple[object, ...], DeviceBytes] = {}

    def stages(self, pp: int) -> tuple[Stage, ...]:
        if pp not in self._stages:
            made = stages(self.spec, pp)
            self._contents[pp] = tuple((self._count(stage), stage.has_embedding, stage.has_head) for stage in made)
            self._representatives[pp] = _first_of_each(self._contents[pp])
            self._stages[pp] = made
        return self._stages[pp]

    def contents(self, pp: int) -> tuple[Contents, ...]:
        self.stages(pp)
        return self._contents[pp]

    def _count(self, stage: Stage) -> tuple[int, ...]:
        held = self.numbers[stage.first_layer : stage.first_layer + stage.num_layers]
        return tuple(held.count(kind) for kind in range(len(self.kinds)))

    def _kept_by(self, job: TrainingJob) -> KeptActivations:
        key = layer_key(job)
        if key not in self._kept:
            self._kept[key] = self._compute_kept(job)
        return self._kept[key]

    def _compute_kept(self, job: TrainingJob) -> KeptActivations:
        spec = self.spec
        head = (*head_operations(spec, job), *next_token_operations(spec, job))
        return KeptActivations(
            layers=tuple(layer_bytes(spec, layer, job) for layer in self.kinds),
            working=max(recomputed_bytes(spec, layer, job) for layer in self.kinds),
            embedding=sum(operation.saved_bytes for operation in embedding_operations(spec, job)),
            head=sum(operation.saved_bytes for operation in head),
        )

    def elements(self, job: TrainingJob) -> tuple[Elements, ...]:
        """Of the representative stages (`_first_of_each`)."""
        groups = job.groups
        key = (groups.tp, groups.pp, groups.ep, groups.expert_tp)
        if key not in self._elements:
            made = self.stages(groups.pp)
            representatives = self._representatives[groups.pp]
            self._elements[key] = tuple(stage_elements(self.spec, self.rules, job, made[index]) for index in representatives)
        return self._elements[key]

    def memory(self, job: TrainingJob) -> DeviceBytes:
        """Of the fullest stage."""
        key = (*layer_key(job), job.groups.pp, job.groups.dp, job.num_micro_batches, job.virtual_stages, job.zero)
        if key not in self._memory:
            self._memory[key] = self._fullest(job)
        return self._memory[key]

    def _fullest(self, job: TrainingJob) -> DeviceBytes:
        pp = job.groups.pp
        made = self.stages(pp)
        representatives = zip(self._representatives[pp], self.elements(job), strict=True)
        held = [self._stage_memory(job, index, made[index], elements) for index, elements in representatives]
        return max(held, key=lambda stage: stage.total)

    def _stage_memory(self, job: TrainingJob, index: int, stage: Stage, elements: Elements) -> DeviceBytes:
        kept, (counts, _, _) = self._kept_by(job), self._contents[job.groups.pp][index]
        flying = in_flight(job, index)
        layers = flying * sum(count * each for count, each in zip(counts, kept.layers, strict=True))
        ends = flying * kept.embedding * stage.has_embedding + kept.head * stage.has_head
        states = stage_states_of(elements, job, stage)
        activations = layers + ends + kept.working
        overhead = CONTEXT_BYTES + efficiency_of(job).reserved * (states.working + activations)
        return DeviceBytes(states=states, activations=activations, overhead=overhead)


def _first_of_each(contents: tuple[Contents, ...]) -> tuple[int, ...]:
    """Of equal stages, the first has the most micro-batches in flight."""
    first: dict[Contents, int] = {}
    for index, held in enumerate(contents):
        first.setdefault(held, index)
    return tuple(first.values())


def device_bytes(spec: ModelSpec, rules: tuple[Rule, ...], job: TrainingJob) -> DeviceBytes:
    """Of one job."""
    return Footprints(spec, rules).memory(job)
