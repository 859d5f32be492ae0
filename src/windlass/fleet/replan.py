"""The port through which a fleet asks how the machines it has now are to share the model. Who answers (plan/epoch.py) is wired in `cli`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from windlass.core.epoch import EpochPlan, Node

__all__ = ["EpochPlan", "Node", "Replan"]


class Replan(Protocol):
    """Pure: the same nodes give the same plan."""

    def __call__(self, nodes: Sequence[Node]) -> EpochPlan:
        """The first node is the root's, which has the first rank. Raises DoesNotFit with the bytes that are missing."""
        ...
