"""Memory of one pipeline stage, computed directly: what the planner's cached `Footprints` is compared with."""

from __future__ import annotations

from windlass.core.model import Frozen, ModelSpec
from windlass.core.rule import Rule
from windlass.tasks.plan.training.job import TrainingJob
from windlass.tasks.plan.training.memory.activations import in_flight, layer_bytes, recomputed_bytes
from windlass.tasks.plan.training.memory.states import StateBytes, stage_elements, stage_states_of
from windlass.tasks.plan.training.stages import Stage, layer_kinds
from windlass.tasks.plan.training.work.layers import embedding_operations, head_operations, next_token_operations


def stage_states(spec: ModelSpec, rules: tuple[Rule, ...], job: TrainingJob, stage: Stage) -> StateBytes:
    return stage_states_of(stage_elements(spec, rules, job, stage), job, stage)


class ActivationBytes(Frozen):
    layers: float
    """Kept by all layers of the stage for the micro-batches in flight."""
    ends: float
    """Kept by the embedding, the head and its loss."""
    working: float
    """What recomputation brings back for one layer."""

    @property
    def total(self) -> float:
        return self.layers + self.ends + self.working


def stage_activations(spec: ModelSpec, job: TrainingJob, stage: Stage, stage_index: int) -> ActivationBytes:
    kinds, numbers = layer_kinds(spec)
    each = [layer_bytes(spec, layer, job) for layer in kinds]
    flying = in_flight(job, stage_index)
    working = max(recomputed_bytes(spec, layer, job) for layer in kinds)
    return ActivationBytes(
        layers=flying * sum(each[numbers[layer]] for layer in stage.layers),
        ends=_ends_bytes(spec, job, stage, flying),
        working=working,
    )


def _ends_bytes(spec: ModelSpec, job: TrainingJob, stage: Stage, flying: float) -> float:
    kept = 0.0
    if stage.has_embedding:
        kept += flying * sum(operation.saved_bytes for operation in embedding_operations(spec, job))
    if stage.has_head:  # its backward follows at once, so one micro-batch is all that is ever kept
        kept += sum(operation.saved_bytes for operation in (*head_operations(spec, job), *next_token_operations(spec, job)))
    return kept
