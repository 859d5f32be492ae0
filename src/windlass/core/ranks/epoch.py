"""How a model is laid over the machines there are now: what a plan of one epoch decides, and what it is decided from. Values only.

An epoch is one life of all ranks of a split model. Who makes such a plan is wired in `cli`.
"""

from __future__ import annotations

from windlass.core.hardware.defaults import CPU_NIC_BYTES_PER_SECOND, ETHERNET_LATENCY_SECONDS
from windlass.core.hardware.spec import Device
from windlass.core.layout import Layout
from windlass.core.model import Frozen
from windlass.core.place import Interval
from windlass.core.plan import Plan, Reason


class Node(Frozen):
    """A machine that takes part, as its worker found it."""

    name: str
    """As the user gave it: `a:9998`; the root's own is `root`."""
    memory_bytes: int
    """Free for weights and keys and values."""
    bandwidth: float
    """Bytes per second that its memory was measured to give; 0: not known."""
    address: str = ""
    """Of the interface that other ranks reach it at."""
    cores: int = 1
    num_ranks: int = 1
    """Processes that it is to take."""
    gpus: tuple[Device, ...] = ()
    """Where ranks run on them: one each, in turn."""
    link_bandwidth: float = CPU_NIC_BYTES_PER_SECOND
    """Bytes per second, one direction, to the other machines."""
    link_seconds: float = ETHERNET_LATENCY_SECONDS
    """For a small message to arrive."""


class EpochPlan(Frozen):
    layout: Layout
    nodes: tuple[int, ...]
    """Of each rank: the number of its node among those that were given."""
    shares: tuple[float, ...] = ()
    """How much each tp index takes; empty: alike."""
    stages: tuple[Interval, ...] = ()
    """Layers of each pp index."""
    tokens_per_second: float = 0.0
    """Predicted, one sequence."""
    imbalance: float = 1.0
    """The seconds of the slowest rank over the mean: 1.0 is even."""
    rank_bytes: tuple[int, ...] = ()
    """Weights, keys and values and all else, of each rank."""
    reasons: tuple[Reason, ...] = ()

    @property
    def remarks(self) -> tuple[str, ...]:
        """What an operator should know of it, a line each: what is expected, and where machines that differ are given unlike parts."""
        expected = (f"{self.tokens_per_second:.3g} tokens/s predicted for one sequence",) if self.tokens_per_second else ()
        said = ("shares", "stages", "imbalance", "left out")
        return expected + tuple(f"{one.choice} {one.value}: {one.why}" for one in self.reasons if one.choice in said)


def planned_epoch(plan: Plan) -> EpochPlan:
    """A saved plan, as a fleet runs it. Its first node is the root's, in the order that ranks have them."""
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
