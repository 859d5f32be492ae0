"""Step time of many candidate jobs of one model on the same hardware, with cached parts."""

from __future__ import annotations

from windlass.core.hardware.spec import Hardware
from windlass.core.model import Frozen, ModelSpec
from windlass.core.rule import Rule
from windlass.tasks.plan.training.frameworks import Efficiency, efficiency_of
from windlass.tasks.plan.training.job import TrainingJob
from windlass.tasks.plan.training.memory.footprint import Contents, DeviceBytes, Footprints, LayerKey, layer_key
from windlass.tasks.plan.training.time.layer import DeviceRates, LayerCost, device_rates, ends_cost, layer_cost
from windlass.tasks.plan.training.time.step import StageCosts, TrainingStepTime, assemble_step


class LayerCosts(Frozen):
    """Costs that depend only on the degrees within a stage."""

    layers: tuple[LayerCost, ...]
    """Of each kind of layer."""
    first: LayerCost
    last: LayerCost


class Evaluator:
    """Caches of one search. Footprints are device-independent, so that searches on several devices can share them."""

    def __init__(self, footprints: Footprints, hardware: Hardware, compute: str, how: Efficiency | None = None) -> None:
        self.footprints, self.hardware = footprints, hardware
        self.rates: DeviceRates = device_rates(hardware, compute, how)
        self.capacity_bytes = hardware.nodes[0].devices[0].memory_bytes
        self._costs: dict[LayerKey, LayerCosts] = {}
        self._stage_costs: dict[tuple[LayerKey, int], StageCosts] = {}

    def memory(self, job: TrainingJob) -> DeviceBytes:
        return self.footprints.memory(job)

    def fits(self, job: TrainingJob) -> bool:
        """On the device, in its host's memory and on its disk."""
        node, held = self.hardware.nodes[0], self.memory(job)
        share = len(node.devices)
        outside = held.states.host * share <= node.ram_bytes and held.states.disk * share <= node.disk_bytes
        return outside and held.total <= self.capacity_bytes

    def step(self, job: TrainingJob) -> TrainingStepTime:
        elements = max(self.footprints.elements(job), key=lambda held: held.total)
        return assemble_step(self.footprints.spec, self.hardware, job, self.rates, self.stage_costs(job), elements)

    def stage_costs(self, job: TrainingJob) -> StageCosts:
        key = (layer_key(job), job.groups.pp)
        if key not in self._stage_costs:
            self._stage_costs[key] = self._add_stages(job)
        return self._stage_costs[key]

    def _add_stages(self, job: TrainingJob) -> StageCosts:
        each = self._layer_costs(job)
        contents = self.footprints.contents(job.groups.pp)
        distinct = {held: _sum_stage(each, held) for held in set(contents)}
        return StageCosts(costs=tuple(distinct[held] for held in contents))

    def _layer_costs(self, job: TrainingJob) -> LayerCosts:
        key = layer_key(job)
        if key not in self._costs:
            spec, rates = self.footprints.spec, self.rates
            self._costs[key] = LayerCosts(
                layers=tuple(layer_cost(spec, layer, job, rates) for layer in self.footprints.kinds),
                first=ends_cost(spec, job, rates, first=True, last=False),
                last=ends_cost(spec, job, rates, first=False, last=True),
            )
        return self._costs[key]


def _sum_stage(each: LayerCosts, contents: Contents) -> LayerCost:
    counts, has_embedding, has_head = contents
    cost = LayerCost()
    for layer, count in zip(each.layers, counts, strict=True):
        cost = cost.plus(layer, count)
    if has_embedding:
        cost = cost.plus(each.first)
    return cost.plus(each.last) if has_head else cost


def predict_step(spec: ModelSpec, rules: tuple[Rule, ...], hardware: Hardware, job: TrainingJob) -> TrainingStepTime:
    """Of one job."""
    return Evaluator(Footprints(spec, rules), hardware, job.compute, efficiency_of(job)).step(job)
