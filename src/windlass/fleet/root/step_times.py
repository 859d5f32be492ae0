"""What ranks say they have done, to where the time of a step goes: computing, waiting for others, the wire. Pure.

Of one collective, the least time that any rank of the group spent in it is what the wire takes, and the rest is waiting: whoever comes last
does not wait. Counts are sums over many steps, so that this is a bound: where ranks take turns in being late, some waiting is called wire.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from windlass.core.layout import Layout, coordinates
from windlass.core.model import Frozen
from windlass.engine.ranks.messages import RankHeartbeat
from windlass.parallel.group import Count

STEPS = "steps"
"""What the first rank tells the others; nobody waits in it."""


class RankTime(Frozen):
    """Of one rank, a step."""

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
    """`seconds`: that the steps between the two took, as the first rank saw it; `names`: of each rank's machine."""
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
    wire = sum(_on_the_wire(rank, name, spent, layout) for name in own)
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


def _on_the_wire(rank: int, name: str, spent: Mapping[int, Mapping[str, Count]], layout: Layout) -> float:
    """Of one kind of collective: the least of those that take part in it."""
    if name == STEPS:
        return spent[rank][name].seconds
    others = [other for other in spent if _group(layout, other, name) == _group(layout, rank, name)]
    return min((spent[other][name].seconds for other in others if name in spent[other]), default=0.0)


def _group(layout: Layout, rank: int, name: str) -> int:
    """Ranks of a stage share tp, ranks of a tp index pass layers on."""
    at = coordinates(layout, rank)
    return at.pp if name.startswith("tp") else at.tp
