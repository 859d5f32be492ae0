"""What every group must do, whoever its ranks are. And one rank of a group of processes."""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

import torch

from waiting import HUNG_SECONDS
from windlass.core.layout import Layout


def check_group(group: Any) -> None:
    """Values tell which rank said what."""
    rank, size = group.rank, group.size
    x = torch.arange(3, dtype=torch.float64) + 10.0 * rank
    group.all_reduce(x)
    assert x.tolist() == [size * i + 10.0 * sum(range(size)) for i in range(3)]

    parts = [torch.empty(2, dtype=torch.int32) for _ in range(size)]
    group.all_gather(torch.tensor([rank, 7], dtype=torch.int32), parts)
    assert [part.tolist() for part in parts] == [[r, 7] for r in range(size)]

    uneven = [torch.full((2, r + 1), -1.0) for r in range(size)]
    group.gather(torch.full((2, rank + 1), float(rank)), uneven)
    assert all(bool((part == (r if rank == 0 else -1)).all()) for r, part in enumerate(uneven))

    told = torch.tensor([rank, rank + 5])
    group.broadcast(told)
    assert told.tolist() == [0, 5]
    check_ring(group)


def check_ring(group: Any) -> None:
    """Round and round: stage by stage, and from the last back to the first. Two rounds, so that nothing is left over of the first."""
    for word in (3.0, 4.0):
        x = torch.full((2, 2), word)
        if group.rank:
            group.receive_previous(x)
        x = x + group.rank
        group.send_next(x)
        if group.rank == 0:
            group.receive_previous(x)
            assert x.tolist() == [[word + sum(range(group.size))] * 2] * 2


class Way(NamedTuple):
    """How ranks talk. Machines: equal numbers share memory; none: all do."""

    transport: str = "links"
    host: str = ""
    machines: tuple[int, ...] = ()
    sync: str = "exact"


def joined(rank: int, folder: str, layout: Layout, way: Way, timeout_seconds: float = HUNG_SECONDS) -> Any:
    from windlass.core.ranks.rendezvous import Meeting
    from windlass.runtime.kernels.cpu.links import make_links
    from windlass.runtime.kernels.program import program
    from windlass.runtime.parallel.join import join_ranks
    from windlass.runtime.parallel.store import FolderStore

    torch.set_num_threads(1)
    if program.available():
        program.set_threads(1)
    machines = way.machines or (0,) * layout.world
    meeting = Meeting(key=bytes(32), hosts=(way.host,) * layout.world, machines=machines, sync=way.sync, transport=way.transport)
    return join_ranks(meeting, layout, rank, FolderStore(folder), links=make_links, timeout_seconds=timeout_seconds)


def rank_of_processes(rank: int, folder: str, layout: Layout, way: Way, what: str) -> None:
    """`talk`; or the last rank may `die`, or be `stuck`: there, and silent. The others miss it: one that died by its end and not because
    nothing came for long, one that is stuck because of that.
    """
    from windlass.runtime.parallel.group import GroupLost

    groups = joined(rank, folder, layout, way, 5.0 if what == "stuck" else 24 * 3600.0)
    if what == "talk":
        for group in (groups.tp, groups.pp):
            if group.size > 1:
                check_group(group)
                check_counts(group)
        _leave_together(groups)
        return
    x = torch.ones(4)
    group = groups.tp if layout.tp > 1 else groups.pp
    group.all_reduce(x)
    if rank == layout.world - 1:
        time.sleep(24 * 3600 if what == "stuck" else 0)
        os._exit(0)
    try:
        group.all_reduce(x) if layout.tp > 1 else group.receive_previous(x)
    except GroupLost:
        os._exit(0)
    os._exit(4)  # nobody missed the rank that is gone


def check_counts(group: Any) -> None:
    """Every collective that `check_group` makes was counted once, or twice."""
    counts = group.counts()
    calls = {name: count.calls for name, count in counts.items()}
    assert set(calls) == {"all_reduce", "all_gather", "gather", "broadcast", "send_next", "receive_previous"}
    assert all(1 <= number <= group.size for number in calls.values()), calls
    assert all(count.seconds > 0 for count in counts.values())
    assert counts["send_next"].sent_bytes == counts["receive_previous"].received_bytes == 2 * 16
    assert counts["broadcast"].sent_bytes == (0 if group.rank else 16 * (group.size - 1))


def _leave_together(groups: Any) -> None:
    """Over gloo, whoever leaves first is missed by those that still read what it said."""
    for group in (groups.tp, groups.pp):
        group.all_reduce(torch.ones(1))


def rank_without_compiler(rank: int, folder: str, layout: Layout, way: Way) -> None:
    """The last rank has nothing compiled: all of them talk by gloo."""
    if rank == layout.world - 1:
        os.environ["WINDLASS_NO_NATIVE"] = "1"
    groups = joined(rank, folder, layout, way)
    assert type(groups.tp).__name__ == "ProcessGroup"
    check_group(groups.tp)
    _leave_together(groups)
