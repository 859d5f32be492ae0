"""The slices of stored tensors that a rank reads, from headers alone. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from windlass.core.layout import Layout, coordinates
from windlass.core.place import Interval, Placement, place
from windlass.runtime.weights.tensors.shards import RankShare, shard_of
from windlass.runtime.weights.tensors.slices import Slice, disjoint
from windlass.runtime.weights.tensors.stored_slices import stored_slices
from windlass.runtime.weights.tensors.tensor_index import TensorIndex

if TYPE_CHECKING:
    from windlass.core.scheme import Scheme
    from windlass.runtime.weights.source import OpenedModel

__all__ = ["Slice", "needed", "placement_of"]


def placement_of(
    opened: OpenedModel,
    layout: Layout,
    shares: Sequence[float] = (),
    stages: tuple[Interval, ...] = (),
    stored: Scheme | None = None,
) -> Placement:
    """As the ranks place it (runtime/engine/ranks/first.py). `stored`: the storage scheme, if already known."""
    from windlass.runtime.weights.schemes import cutting_scheme

    how = stored or cutting_scheme(opened)
    return place(opened.rules, opened.spec.num_layers, layout, how, shares=shares or None, stages=stages or None)


def needed(opened: OpenedModel, placement: Placement, layout: Layout, rank: int) -> list[Slice]:
    """Each element once. `opened`: by weights.source.open_model."""
    at, spec = coordinates(layout, rank), opened.spec
    share = RankShare(placement=placement, tp_index=at.tp)
    experts = share.experts(spec.experts.num_experts) if spec.experts else None
    held = TensorIndex(opened.rules).held(spec, placement.stages[at.pp], experts)
    parts = (shard_of(ours, opened.locations[ours.name], share.slices(ours.rule)) for ours in held)
    return disjoint(one for part in parts for one in stored_slices(opened.store, part))
