"""The slices of stored tensors that a rank reads, from headers alone. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from windlass.core.layout import Layout, coordinates
from windlass.core.place import Interval, Placement, place
from windlass.weights.tensors.names import Named
from windlass.weights.tensors.parts import Share, part_at
from windlass.weights.tensors.slices import Slice, disjoint
from windlass.weights.tensors.stored import stored_slices

if TYPE_CHECKING:
    from windlass.core.scheme import Scheme
    from windlass.weights.source import Opened

__all__ = ["Slice", "needed", "placement_of"]


def placement_of(
    opened: Opened, layout: Layout, shares: Sequence[float] = (), stages: tuple[Interval, ...] = (), stored: Scheme | None = None
) -> Placement:
    """As the ranks place it (engine/ranks/first.py). `stored`: the storage scheme, if already known."""
    from windlass.weights.cuts import scheme_of

    how = stored or scheme_of(opened)
    return place(opened.rules, opened.spec.num_layers, layout, how, shares=shares or None, stages=stages or None)


def needed(opened: Opened, placement: Placement, layout: Layout, rank: int) -> list[Slice]:
    """Each element once. `opened`: by weights.source.open_model."""
    at, spec = coordinates(layout, rank), opened.spec
    share = Share(placement=placement, tp_index=at.tp)
    experts = share.experts(spec.experts.num_experts) if spec.experts else None
    held = Named(opened.rules).held(spec, placement.stages[at.pp], experts)
    parts = (part_at(ours, opened.places[ours.name], share) for ours in held)
    return disjoint(one for part in parts for one in stored_slices(opened.store, part))
