"""Where the time of a step goes on each rank: compute, waiting for other ranks, communication. From two heartbeats. Pure.

The least time that any rank of a group spends in a collective is taken as communication, since the last rank to arrive does not wait; the
rest is waiting. Counters are sums over many steps, so this is a bound: if ranks take turns in being late, some waiting counts as communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from windlass.core.layout import Layout, coordinates
from windlass.core.model import Frozen
from windlass.runtime.engine.ranks.messages import RankHeartbeat
from windlass.runtime.parallel.group import Count

STEPS = "steps"
"""Rank 0's step broadcast, in which no rank waits."""


class RankTime(Frozen):
    """Of one rank, per step."""

    rank: int
    node: str
    compute_seconds: float
    waiting_seconds: float
    wire_seconds: float
    sent_bytes: float
    received_bytes: float


def rank_times(
    before: Mapping[int, RankHeartbeat],
    after: Mapping[int, RankHeartbeat],
    layout: Layout,
    names: Sequence[str],
    seconds: float,
    steps: int,
) -> list[RankTime]:
    """`seconds`: of all steps between the two, measured by rank 0; `names`: each rank's machine."""
    spent = {rank: _between(before.get(rank, RankHeartbeat()).counts, after[rank].counts) for rank in sorted(after)}
    return [_time(rank, names[rank], spent, layout, seconds, steps, before, after) for rank in spent]


def _between(before: Mapping[str, Count], after: Mapping[str, Count]) -> dict[str, Count]:
    return {name: _less(count, before.get(name, Count())) for name, count in after.items()}


def _less(count: Count, other: Count) -> Count:
    return Count(
        count.calls - other.calls,
        count.sent_bytes - other.sent_bytes,
        count.received_bytes - other.received_bytes,
        count.seconds - other.seconds,
    )


def _time(
    rank: int,
    node: str,
    spent: Mapping[int, Mapping[str, Count]],
    layout: Layout,
    seconds: float,
    steps: int,
    before: Mapping[int, RankHeartbeat],
    after: Mapping[int, RankHeartbeat],
) -> RankTime:
    own = spent[rank]
    talking = sum(count.seconds for count in own.values())
    wire = sum(_communication_seconds(rank, name, spent, layout) for name in own)
    in_steps = seconds if rank == 0 else after[rank].step_seconds - before.get(rank, RankHeartbeat()).step_seconds
    compute = max(in_steps - talking, 0.0)
    return RankTime(
        rank=rank,
        node=node,
        compute_seconds=compute / steps,
        waiting_seconds=max(seconds - compute - wire, 0.0) / steps,
        wire_seconds=wire / steps,
        sent_bytes=sum(count.sent_bytes for count in own.values()) / steps,
        received_bytes=sum(count.received_bytes for count in own.values()) / steps,
    )


def _communication_seconds(rank: int, name: str, spent: Mapping[int, Mapping[str, Count]], layout: Layout) -> float:
    """Of one kind of collective: the minimum over its ranks."""
    if name == STEPS:
        return spent[rank][name].seconds
    others = [other for other in spent if group_of(layout, other, name) == group_of(layout, rank, name)]
    return min((spent[other][name].seconds for other in others if name in spent[other]), default=0.0)


def group_of(layout: Layout, rank: int, name: str) -> int:
    """Which ranks a collective joins: tp groups are the ranks of a stage, pp groups the ranks of a tp index."""
    at = coordinates(layout, rank)
    return at.pp if name.startswith("tp") else at.tp
