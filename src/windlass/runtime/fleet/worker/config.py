"""The configuration of a supervisor, and its log. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from windlass.runtime.fleet.transfer.cache import WeightCache
from windlass.runtime.fleet.worker.local_checkpoints import LocalCheckpoints


class WorkerLog(Protocol):
    """Where a supervisor reports to its operator."""

    def line(self, text: str) -> None: ...

    def show_status(self, text: str) -> None:
        """The current status, which the next one replaces."""
        ...


@dataclass(frozen=True)
class WorkerConfig:
    device: str = "cpu"
    address: str = ""
    """Where other ranks reach its ranks; empty: the address the root connected to."""
    cache: WeightCache | None = None
    """Of received weights; None: the root's own machine, which reads its own files."""
    local: LocalCheckpoints = field(default_factory=LocalCheckpoints)
