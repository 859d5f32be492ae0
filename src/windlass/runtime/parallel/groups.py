"""The groups of one rank: tensor-parallel (tp) and pipeline-parallel (pp).

Expert parallelism needs no group of its own: the tp ranks hold the experts, each evaluates its own for all tokens, and their outputs are part
of the tp all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from windlass.core.layout import Layout, coordinates
from windlass.errors import Impossible
from windlass.runtime.parallel.group import Group, SoloGroup

JoinGroup = Callable[[str, int, int], Group]
"""(unique name of the group, rank within it, size) to the group."""


@dataclass(frozen=True)
class Groups:
    tp: Group
    pp: Group

    def close(self) -> None:
        self.tp.close()
        self.pp.close()


SOLO = Groups(SoloGroup(), SoloGroup())


def make_groups(layout: Layout, rank: int, join: JoinGroup) -> Groups:
    """Called by all ranks of a layout; returns once the groups of this one are connected."""
    if not 0 <= rank < layout.world:
        raise Impossible(f"rank {rank} of {layout.world} (tp {layout.tp} x pp {layout.pp} x dp {layout.dp}): ranks count from 0")
    at = coordinates(layout, rank)
    tp = _joined(join, f"tp dp{at.dp} pp{at.pp}", at.tp, layout.tp)
    return Groups(tp, _joined(join, f"pp dp{at.dp} tp{at.tp}", at.pp, layout.pp))


def _joined(join: JoinGroup, name: str, rank: int, size: int) -> Group:
    return SoloGroup() if size == 1 else join(name, rank, size)


def smallest(groups: Groups, numbers: Sequence[int], device: str = "cpu") -> list[int]:
    """Of each of the numbers, the smallest of all ranks: what they must choose alike, though each knows only its own memory.

    Every rank calls it. `device`: where the groups communicate.
    """
    import torch

    found = torch.tensor(list(numbers), dtype=torch.int64, device=device)
    for group in (groups.tp, groups.pp):
        every = [torch.empty_like(found) for _ in range(group.size)]
        group.all_gather(found, every)
        found = torch.stack(every).amin(0)
    return found.tolist()
