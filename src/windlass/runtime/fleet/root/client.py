"""A fleet as a Client. No torch is imported here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass.core.metrics.metric import Metric
from windlass.core.request import Info
from windlass.runtime.engine.client.client import EngineClient
from windlass.runtime.fleet.root.describe import NodeStatus
from windlass.runtime.fleet.root.metrics import Readings, readings, with_all_tiers
from windlass.runtime.fleet.root.root import Fleet

if TYPE_CHECKING:
    from windlass.runtime.engine.client.requests import Progress
    from windlass.runtime.weights.text.files import ModelText

MAX_CRASHES = 3
"""Engine crashes a request survives; on several machines more of them are not its fault."""


class FleetClient(EngineClient):
    """Owns the fleet: closing it closes the fleet."""

    def __init__(self, fleet: Fleet, text: ModelText | None = None, progress: Progress | None = None) -> None:
        super().__init__(fleet.transport, text, progress, MAX_CRASHES)
        self.fleet = fleet

    @property
    def nodes(self) -> tuple[NodeStatus, ...]:
        """The machines and their current state."""
        return self.fleet.nodes

    async def info(self) -> Info:
        """With the tiers of all ranks: the engine process is rank 0, and knows its own."""
        return with_all_tiers(await super().info(), self.fleet.last_heartbeats)

    def readings(self) -> dict[Metric, Readings]:
        """For /metrics."""
        plan = self.fleet.plan
        return readings(self.nodes, self.fleet.last_heartbeats, self.fleet.rank_machines, None if plan is None else plan.layout)

    async def close(self) -> None:
        await super().close()
        await self.fleet.close()
