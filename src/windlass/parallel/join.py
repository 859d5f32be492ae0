"""From a meeting to the groups of a rank: which of them talk by links, which by torch.distributed."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from windlass.core.layout import Layout, coordinates
from windlass.core.ranks.rendezvous import INT8, SYNCS, Meeting
from windlass.errors import Impossible, UnknownName
from windlass.parallel.group import Group, GroupLost
from windlass.parallel.groups import Groups, make_groups
from windlass.parallel.mesh import MEETING_SECONDS, connect_all
from windlass.parallel.processes import TIMEOUT_SECONDS, gloo_group, nccl_group
from windlass.parallel.rendezvous import Board
from windlass.parallel.shared_memory import share_memory

TRANSPORTS = ("auto", "links", "gloo", "nccl")


@dataclass(frozen=True)
class Wires:
    """What links of one group are made of."""

    name: str
    rank: int
    sockets: Sequence[socket.socket | None]
    """To every other rank."""
    second: Sequence[socket.socket | None]
    """The same again where sums are small, so that the two ways of a pair do not mix (kernels/native/links/links.h)."""
    memory: Sequence[int | None]
    """Of every rank that shares memory with this one: a file that both have open (parallel/shared_memory.py)."""
    sync: str
    timeout_seconds: float
    is_local: bool
    """Whether all ranks of the group are on this machine."""
    is_crowded: bool
    """Whether ranks outnumber cores here, so that whoever waits should not keep one busy."""
    lost: Callable[[str], Exception] = GroupLost
    """What is raised when another rank is missed."""


class MakeLinks(Protocol):
    def available(self) -> bool:
        """Whether links can be had here."""
        ...

    def __call__(self, wires: Wires) -> Group: ...


def join(
    meeting: Meeting,
    layout: Layout,
    rank: int,
    board: Board,
    device: str,
    make_links: MakeLinks | None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Groups:
    transport = _transport(meeting, device, layout, rank, board, make_links)

    def members(name: str) -> list[int]:
        return [other for other in range(layout.world) if name in _names(layout, other)]

    def join_one(name: str, at: int, size: int) -> Group:
        if transport == "nccl":
            return nccl_group(board, name, at, size, timeout_seconds)
        if transport == "gloo":
            return gloo_group(board, name, at, size, meeting.hosts[rank], timeout_seconds)
        assert make_links is not None
        ranks = members(name)
        return make_links(_wires(meeting, rank, ranks, at, name, board, timeout_seconds))

    return make_groups(layout, rank, join_one)


def _transport(meeting: Meeting, device: str, layout: Layout, rank: int, board: Board, make_links: MakeLinks | None) -> str:
    if meeting.transport not in TRANSPORTS:
        raise UnknownName("transport", meeting.transport, TRANSPORTS)
    if meeting.sync not in SYNCS:
        raise UnknownName("sync", meeting.sync, SYNCS)
    has_links = make_links is not None and make_links.available()
    chosen = meeting.transport
    if chosen == "auto":
        is_cpu = device.split(":")[0] == "cpu"
        chosen = "nccl" if not is_cpu else "links" if _all_have_links(layout.world, rank, board, has_links) else "gloo"
    elif chosen == "links" and not has_links:
        raise Impossible(
            "links between ranks need compiled kernels, and there are none here; install g++, or set the transport to gloo"
        )
    if meeting.sync == INT8 and chosen != "links":
        raise Impossible(f"sums travel as int8 over links only, and these ranks talk by {chosen}; leave --sync away")
    return chosen


def _all_have_links(world: int, rank: int, board: Board, has_links: bool) -> bool:
    """A machine without a compiler talks as it can, and so do all."""
    board.put(f"has links/{rank}", b"yes" if has_links else b"no")
    return all(board.take(f"has links/{other}", MEETING_SECONDS) == b"yes" for other in range(world))


def _names(layout: Layout, rank: int) -> tuple[str, str]:
    """As make_groups names the groups of a rank."""
    at = coordinates(layout, rank)
    return f"tp dp{at.dp} pp{at.pp}", f"pp dp{at.dp} tp{at.tp}"


def _wires(meeting: Meeting, rank: int, ranks: list[int], at: int, name: str, board: Board, timeout_seconds: float) -> Wires:
    machine = meeting.machines[rank]
    sockets = connect_all(board, name, at, len(ranks), meeting.key, meeting.hosts[rank])
    between = meeting.sync == INT8 and len(ranks) > 2 and len({meeting.machines[other] for other in ranks}) > 1
    second = (
        connect_all(board, f"{name} second", at, len(ranks), meeting.key, meeting.hosts[rank]) if between else [None] * len(ranks)
    )
    together = [meeting.machines[other] == machine for other in ranks]
    return Wires(
        name=name,
        rank=at,
        sockets=sockets,
        second=second,
        memory=share_memory(sockets, together, at),
        sync=meeting.sync,
        timeout_seconds=timeout_seconds,
        is_local=all(together),
        is_crowded=meeting.machines.count(machine) > _num_cores(),
    )


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
