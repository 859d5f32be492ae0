"""Memory and time of many candidate jobs on the same model and hardware, each part worked out once. Knows no preferences."""

from __future__ import annotations

from windlass.core.hardware import Hardware
from windlass.core.model import Frozen, ModelSpec
from windlass.core.rule import Rule
from windlass.plan.training.activations import in_flight, layer_bytes, recomputed_bytes
from windlass.plan.training.cost import Cost, Machine, ends_cost, layer_cost, machine_of
from windlass.plan.training.job import Job
from windlass.plan.training.layers import embedding_operations, head_operations, next_token_operations
from windlass.plan.training.stages import Stage, layer_kinds, stages
from windlass.plan.training.states import Elements, StateBytes, stage_elements, stage_states_of
from windlass.plan.training.time import StageCosts, StepTime, assemble_step

OVERHEAD_BYTES = 943_000_000
"""CUDA context and libraries 551 MB, NCCL buffers 392 MB for 4 to 8 devices (ai-dynamo/aiconfigurator systems/*.yaml)."""

FRAGMENTATION = 0.05
"""Of activations and states: blocks the caching allocator cannot hand out. An assumption; nothing public measures it."""


class DeviceBytes(Frozen):
    """Of the fullest device."""

    states: StateBytes
    activations: float
    overhead: float

    @property
    def total(self) -> float:
        return self.states.device + self.activations + self.overhead


class LayerFacts(Frozen):
    """What depends on the degrees inside a stage only."""

    costs: tuple[Cost, ...]
    first: Cost
    last: Cost
    kept: tuple[float, ...]
    working: float
    embedding: float
    head: float


LayerKey = tuple[int, int, int, int, int, str]


class Evaluator:
    """Holds the caches; one per search."""

    def __init__(self, spec: ModelSpec, rules: tuple[Rule, ...], hardware: Hardware, compute: str) -> None:
        self.spec, self.rules, self.hardware = spec, rules, hardware
        self.machine: Machine = machine_of(hardware, compute)
        self.capacity_bytes = hardware.devices[0].memory_bytes
        self.kinds, self.numbers = layer_kinds(spec)
        self._facts: dict[LayerKey, LayerFacts] = {}
        self._stages: dict[int, tuple[Stage, ...]] = {}
        self._counts: dict[int, tuple[tuple[int, ...], ...]] = {}
        self._telling: dict[int, tuple[int, ...]] = {}
        self._elements: dict[tuple[int, ...], tuple[Elements, ...]] = {}
        self._stage_costs: dict[tuple[LayerKey, int], StageCosts] = {}

    def stages(self, pp: int) -> tuple[Stage, ...]:
        if pp not in self._stages:
            made = stages(self.spec, pp)
            self._stages[pp] = made
            self._counts[pp] = tuple(self._count(stage) for stage in made)
            self._telling[pp] = _first_of_each(made, self._counts[pp])
        return self._stages[pp]

    def _count(self, stage: Stage) -> tuple[int, ...]:
        held = self.numbers[stage.first_layer : stage.first_layer + stage.num_layers]
        return tuple(held.count(kind) for kind in range(len(self.kinds)))

    def facts(self, job: Job) -> LayerFacts:
        key = layer_key(job)
        if key not in self._facts:
            self._facts[key] = self._work_out(job)
        return self._facts[key]

    def _work_out(self, job: Job) -> LayerFacts:
        spec = self.spec
        head = (*head_operations(spec, job), *next_token_operations(spec, job))
        return LayerFacts(
            costs=tuple(layer_cost(spec, layer, job, self.machine) for layer in self.kinds),
            first=ends_cost(spec, job, self.machine, first=True, last=False),
            last=ends_cost(spec, job, self.machine, first=False, last=True),
            kept=tuple(layer_bytes(spec, layer, job) for layer in self.kinds),
            working=max(recomputed_bytes(spec, layer, job) for layer in self.kinds),
            embedding=sum(operation.saved_bytes for operation in embedding_operations(spec, job)),
            head=sum(operation.saved_bytes for operation in head),
        )

    def elements(self, job: Job) -> tuple[Elements, ...]:
        groups = job.groups
        key = (groups.tp, groups.pp, groups.ep, groups.expert_tp)
        if key not in self._elements:
            self._elements[key] = tuple(stage_elements(self.spec, self.rules, job, stage) for stage in self.stages(groups.pp))
        return self._elements[key]

    def memory(self, job: Job) -> DeviceBytes:
        """Of the stage that holds most."""
        pp = job.groups.pp
        made, elements = self.stages(pp), self.elements(job)
        held = [self._stage_memory(job, index, made[index], elements[index]) for index in self._telling[pp]]
        return max(held, key=lambda stage: stage.total)

    def _stage_memory(self, job: Job, index: int, stage: Stage, elements: Elements) -> DeviceBytes:
        facts, counts = self.facts(job), self._counts[job.groups.pp][index]
        flying = in_flight(job, index)
        kept = flying * sum(count * each for count, each in zip(counts, facts.kept, strict=True))
        ends = flying * facts.embedding * stage.has_embedding + facts.head * stage.has_head
        states = stage_states_of(elements, job, stage)
        activations = kept + ends + facts.working
        overhead = OVERHEAD_BYTES + FRAGMENTATION * (states.device + activations)
        return DeviceBytes(states=states, activations=activations, overhead=overhead)

    def stage_costs(self, job: Job) -> StageCosts:
        key = (layer_key(job), job.groups.pp)
        if key not in self._stage_costs:
            self._stage_costs[key] = self._add_stages(job)
        return self._stage_costs[key]

    def _add_stages(self, job: Job) -> StageCosts:
        facts, made = self.facts(job), self.stages(job.groups.pp)
        alike: dict[tuple[tuple[int, ...], bool, bool], Cost] = {}
        costs: list[Cost] = []
        for stage, counts in zip(made, self._counts[job.groups.pp], strict=True):
            key = (counts, stage.has_embedding, stage.has_head)
            if key not in alike:
                alike[key] = _sum_stage(facts, counts, stage)
            costs.append(alike[key])
        return StageCosts(costs=tuple(costs))

    def step(self, job: Job) -> StepTime:
        elements = max(self.elements(job), key=lambda held: held.total)
        return assemble_step(self.spec, self.hardware, job, self.machine, self.stage_costs(job), elements)


def layer_key(job: Job) -> LayerKey:
    groups = job.groups
    return groups.tp, groups.cp, groups.ep, groups.expert_tp, job.micro_batch, job.recompute


def _first_of_each(made: tuple[Stage, ...], counts: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Of stages that hold the same, the first has most micro-batches in flight."""
    first: dict[tuple[tuple[int, ...], bool, bool], int] = {}
    for index, (stage, held) in enumerate(zip(made, counts, strict=True)):
        first.setdefault((held, stage.has_embedding, stage.has_head), index)
    return tuple(first.values())


def _sum_stage(facts: LayerFacts, counts: tuple[int, ...], stage: Stage) -> Cost:
    cost = Cost()
    for each, count in zip(facts.costs, counts, strict=True):
        cost = cost.plus(each, count)
    if stage.has_embedding:
        cost = cost.plus(facts.first)
    return cost.plus(facts.last) if stage.has_head else cost


def predict_step(spec: ModelSpec, rules: tuple[Rule, ...], hardware: Hardware, job: Job) -> StepTime:
    """Of one job."""
    return Evaluator(spec, rules, hardware, job.compute).step(job)


def device_bytes(spec: ModelSpec, rules: tuple[Rule, ...], hardware: Hardware, job: Job) -> DeviceBytes:
    """Of one job."""
    return Evaluator(spec, rules, hardware, job.compute).memory(job)
