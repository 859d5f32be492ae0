"""What of a checkpoint a rank of a placement reads: slices of stored tensors, from the headers alone. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from windlass.weights.slices import Slice

if TYPE_CHECKING:
    from windlass.core.layout import Layout
    from windlass.core.place import Interval, Placement
    from windlass.weights.source import Opened

__all__ = ["Slice", "needed", "placement_of"]


def placement_of(opened: Opened, layout: Layout, shares: Sequence[float] = (), stages: tuple[Interval, ...] = ()) -> Placement:
    """As the ranks themselves place it (engine/split.py)."""
    from windlass.core.place import place
    from windlass.weights.cuts import scheme_of

    return place(opened.rules, opened.spec.num_layers, layout, scheme_of(opened), shares=shares or None, stages=stages or None)


def needed(opened: Opened, placement: Placement, layout: Layout, rank: int) -> list[Slice]:
    raise NotImplementedError
