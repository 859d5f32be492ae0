"""How a model is split over the machines that are connected now: the plan of one epoch, and its input. Values only.

An epoch is one life of all ranks of a split model. The planner is wired in by open/fleet.py.
"""

from __future__ import annotations

from windlass.core.hardware.defaults import CPU_NIC_BYTES_PER_SECOND, ETHERNET_LATENCY_SECONDS
from windlass.core.hardware.spec import Device
from windlass.core.layout import Layout
from windlass.core.model import Frozen
from windlass.core.place import Interval
from windlass.core.plan import Plan, Reason


class Node(Frozen):
    """A machine of the fleet, as its worker measured it."""

    name: str
    """As in --workers: `a:9998`; the root's own machine is `root`."""
    memory_bytes: int
    """Free for weights and KV cache."""
    bandwidth: float
    """Measured memory bandwidth in bytes per second; 0: unknown."""
    address: str = ""
    """Where other ranks reach it."""
    cores: int = 1
    num_ranks: int = 1
    """Processes it runs."""
    gpus: tuple[Device, ...] = ()
    """Ranks take them round robin; empty: ranks run on the CPU."""
    link_bandwidth: float = CPU_NIC_BYTES_PER_SECOND
    """Bytes per second, one direction, to the other machines."""
    link_seconds: float = ETHERNET_LATENCY_SECONDS
    """Latency of a small message."""


class EpochPlan(Frozen):
    layout: Layout
    nodes: tuple[int, ...]
    """Node of each rank, as an index into the given nodes."""
    shares: tuple[float, ...] = ()
    """Share of the work by tp index; empty: equal."""
    stages: tuple[Interval, ...] = ()
    """Layers of each pp index."""
    tokens_per_second: float = 0.0
    """Predicted, one sequence."""
    imbalance: float = 1.0
    """Time of the slowest rank over the mean; 1.0 is balanced."""
    rank_bytes: tuple[int, ...] = ()
    """Memory of each rank: weights, KV cache and the rest."""
    reasons: tuple[Reason, ...] = ()

    @property
    def remarks(self) -> tuple[str, ...]:
        """Lines for the operator: predicted speed, and uneven shares of unequal machines."""
        expected = (f"{self.tokens_per_second:.3g} tokens/s predicted for one sequence",) if self.tokens_per_second else ()
        shown = ("shares", "stages", "imbalance", "left out")
        return expected + tuple(f"{one.choice} {one.value}: {one.why}" for one in self.reasons if one.choice in shown)


def planned_epoch(plan: Plan) -> EpochPlan:
    """From a saved plan. Nodes are numbered in rank order; the first is the root."""
    order = list(dict.fromkeys(rank.node for rank in plan.ranks))
    return EpochPlan(
        layout=plan.layout,
        nodes=tuple(order.index(rank.node) for rank in plan.ranks),
        shares=plan.shares,
        stages=plan.placement.stages if plan.placement is not None and plan.layout.pp > 1 else (),
        tokens_per_second=plan.speed.decode_tokens_per_second if plan.speed is not None else 0.0,
        rank_bytes=tuple(held.total_bytes for held in plan.memory.per_device),
        reasons=plan.reasons,
    )
