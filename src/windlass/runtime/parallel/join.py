"""Makes the groups of a rank, over native links or torch.distributed."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from windlass.core.layout import Layout, coordinates
from windlass.core.ranks.rendezvous import INT8, SYNCS, Meeting
from windlass.errors import Impossible, UnknownName
from windlass.runtime.parallel.group import Group, GroupLost
from windlass.runtime.parallel.groups import Groups, make_groups
from windlass.runtime.parallel.mesh import RENDEZVOUS_SECONDS, connect_all
from windlass.runtime.parallel.processes import TIMEOUT_SECONDS, gloo_group, nccl_group
from windlass.runtime.parallel.shared_memory import share_memory
from windlass.runtime.parallel.store import RendezvousStore

TRANSPORTS = ("auto", "links", "gloo", "nccl")


@dataclass(frozen=True)
class PeerConnections:
    """Of one rank to the others of a group: what native links are made of."""

    name: str
    rank: int
    sockets: Sequence[socket.socket | None]
    """By rank."""
    second: Sequence[socket.socket | None]
    """A second connection to each rank where sums travel as int8, so that the two directions do not mix (runtime/kernels/native/links/links.h)."""
    memory: Sequence[int | None]
    """By rank: a file descriptor of the memory shared with it (runtime/parallel/shared_memory.py)."""
    sync: str
    timeout_seconds: float
    is_local: bool
    """Whether all ranks of the group are on this machine."""
    is_crowded: bool
    """Whether ranks outnumber cores on this machine, so that waiting ranks should yield."""
    lost: Callable[[str], Exception] = GroupLost
    """The exception to raise when another rank is lost."""


class LinkFactory(Protocol):
    def available(self) -> bool:
        """Whether native links are compiled here."""
        ...

    def __call__(self, peers: PeerConnections) -> Group: ...


def join_ranks(
    meeting: Meeting,
    layout: Layout,
    rank: int,
    store: RendezvousStore,
    device: str = "cpu",
    *,
    links: LinkFactory | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Groups:
    """The groups of `rank`; called by all ranks of the layout, with the same store.

    `links`: makes native links (`windlass.runtime.kernels.cpu.links.make_links`); without it, and on GPUs, torch.distributed is used.
    """
    transport = _transport(meeting, device, layout, rank, store, links)

    def members(name: str) -> list[int]:
        return [other for other in range(layout.world) if name in _names(layout, other)]

    def join_one(name: str, at: int, size: int) -> Group:
        if transport == "nccl":
            return nccl_group(store, name, at, size, timeout_seconds)
        if transport == "gloo":
            return gloo_group(store, name, at, size, meeting.hosts[rank], timeout_seconds)
        assert links is not None
        return links(_peers(meeting, rank, members(name), at, name, store, timeout_seconds))

    return make_groups(layout, rank, join_one)


def _transport(
    meeting: Meeting, device: str, layout: Layout, rank: int, store: RendezvousStore, links: LinkFactory | None
) -> str:
    if meeting.transport not in TRANSPORTS:
        raise UnknownName("transport", meeting.transport, TRANSPORTS)
    if meeting.sync not in SYNCS:
        raise UnknownName("sync", meeting.sync, SYNCS)
    has_links = links is not None and links.available()
    chosen = meeting.transport
    if chosen == "auto":
        is_cpu = device.split(":")[0] == "cpu"
        chosen = "nccl" if not is_cpu else "links" if _all_have_links(layout.world, rank, store, has_links) else "gloo"
    elif chosen == "links" and not has_links:
        raise Impossible(
            "native links between ranks need compiled kernels, and none are available; install g++, or set the transport to gloo"
        )
    if meeting.sync == INT8 and chosen != "links":
        raise Impossible(f"--sync int8 works over native links only, and these ranks use {chosen}; drop --sync")
    return chosen


def _all_have_links(world: int, rank: int, store: RendezvousStore, has_links: bool) -> bool:
    """If one machine has no compiler, all ranks use gloo."""
    store.put(f"has links/{rank}", b"yes" if has_links else b"no")
    return all(store.take(f"has links/{other}", RENDEZVOUS_SECONDS) == b"yes" for other in range(world))


def _names(layout: Layout, rank: int) -> tuple[str, str]:
    """The names that make_groups gives to the groups of a rank."""
    at = coordinates(layout, rank)
    return f"tp dp{at.dp} pp{at.pp}", f"pp dp{at.dp} tp{at.tp}"


def _peers(
    meeting: Meeting, rank: int, ranks: list[int], at: int, name: str, store: RendezvousStore, timeout_seconds: float
) -> PeerConnections:
    machine = meeting.machines[rank]
    sockets = connect_all(store, name, at, len(ranks), meeting.key, meeting.hosts[rank])
    between = meeting.sync == INT8 and len(ranks) > 2 and len({meeting.machines[other] for other in ranks}) > 1
    second = (
        connect_all(store, f"{name} second", at, len(ranks), meeting.key, meeting.hosts[rank]) if between else [None] * len(ranks)
    )
    together = [meeting.machines[other] == machine for other in ranks]
    return PeerConnections(
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
