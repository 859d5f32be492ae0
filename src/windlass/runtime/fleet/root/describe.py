"""A fleet's state for people to read: lines for the log, rows for the status page, details of Info. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from windlass.core.request import Info
from windlass.runtime.fleet.root.epoch import Epoch
from windlass.runtime.fleet.root.events import FleetState, WorkerState
from windlass.runtime.fleet.root.member import ROOT, Member


class NodeStatus(msgspec.Struct, frozen=True):
    name: str
    address: str
    state: str
    share: float
    """Of the bytes that all ranks hold."""


def node_statuses(state: FleetState, members: Mapping[str, Member], epoch: Epoch | None) -> tuple[NodeStatus, ...]:
    """The root's machine first."""
    found = [NodeStatus(ROOT, "", state.phase, _share(epoch, ROOT))]
    for worker in state.workers:
        member = members.get(worker.name)
        address = member.probe.address if member else ""
        found.append(NodeStatus(worker.name, address, _worker_state(worker, state, epoch), _share(epoch, worker.name)))
    return tuple(found)


def describe_epoch(epoch: Epoch) -> str:
    """`tp=2 over root (rank 0), a:9998 (rank 1)`"""
    names = ", ".join(f"{member.name} ({_ranks(epoch.ranks(member))})" for member in epoch.participants)
    return f"{epoch.plan.layout} over {names}"


def with_epoch(info: Info, epoch: Epoch) -> Info:
    """Rank 0's Info, completed for all ranks."""
    details = {"nodes": ", ".join(member.name for member in epoch.participants), "epoch": str(epoch.number)}
    return msgspec.structs.replace(
        info,
        weights_bytes=info.weights_bytes + sum(epoch.held_bytes.values()),
        details={**info.details, **details, "layout": str(epoch.plan.layout)},
    )


def _worker_state(worker: WorkerState, state: FleetState, epoch: Epoch | None) -> str:
    if not worker.is_connected:
        return "lost"
    takes_part = epoch is not None and any(member.name == worker.name for member in epoch.participants)
    return state.phase if takes_part else "waiting"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _share(epoch: Epoch | None, name: str) -> float:
    if epoch is None:
        return 0.0
    ranks = [rank for member in epoch.members if member.name == name for rank in epoch.ranks(member)]
    held = epoch.plan.rank_bytes or (1,) * epoch.plan.layout.world
    return sum(held[rank] for rank in ranks) / sum(held)
