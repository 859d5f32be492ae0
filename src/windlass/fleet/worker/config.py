"""What a supervisor has been given: its place on the disk and in the network, and somebody to tell. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from windlass.fleet.transfer.cache import WeightCache
from windlass.fleet.worker.local_checkpoints import LocalCheckpoints


class WorkerLog(Protocol):
    """For whoever watches a worker."""

    def line(self, text: str) -> None: ...

    def show_status(self, text: str) -> None:
        """What is so now; it may be written over."""
        ...


@dataclass(frozen=True)
class WorkerConfig:
    """What a supervisor has been given to work with."""

    device: str = "cpu"
    address: str = ""
    """Where other ranks reach its own; empty: where the root reached it."""
    cache: WeightCache | None = None
    """None: the root's own machine, whose files are read as they are."""
    local: LocalCheckpoints = field(default_factory=LocalCheckpoints)
