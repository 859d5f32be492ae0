"""The groups of one rank: with whom it shares layers (tp), and with whom it passes them on (pp). Pure but for making them.

Experts need no group of their own: the ranks that hold them are those of tp, each evaluates its own for all tokens, and what they say is
summed where tp sums anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from windlass.core.layout import Layout, coordinates
from windlass.errors import Impossible
from windlass.parallel.group import Group, SoloGroup

Join = Callable[[str, int, int], Group]
"""(name of the group, the same on all its ranks and no other's; rank within it; size) to the group itself."""


@dataclass(frozen=True)
class Groups:
    tp: Group
    pp: Group

    def close(self) -> None:
        self.tp.close()
        self.pp.close()


SOLO = Groups(SoloGroup(), SoloGroup())


def make_groups(layout: Layout, rank: int, join: Join) -> Groups:
    """All ranks of a layout call this; it returns once the groups of this one have met."""
    if not 0 <= rank < layout.world:
        raise Impossible(f"rank {rank} of {layout.world} (tp {layout.tp} x pp {layout.pp} x dp {layout.dp}): ranks count from 0")
    at = coordinates(layout, rank)
    tp = _joined(join, f"tp dp{at.dp} pp{at.pp}", at.tp, layout.tp)
    return Groups(tp, _joined(join, f"pp dp{at.dp} tp{at.tp}", at.pp, layout.pp))


def _joined(join: Join, name: str, rank: int, size: int) -> Group:
    return SoloGroup() if size == 1 else join(name, rank, size)
