"""A fleet as a Client: as the local engine's, over as many machines as there are. No torch is imported here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass.engine.client.client import EngineClient
from windlass.fleet.root.root import Fleet, NodeStatus

if TYPE_CHECKING:
    from windlass.engine.client.requests import Progress
    from windlass.weights.text.files import ModelText

MAX_CRASHES = 3
"""Epochs that may break under a request before it fails too: on several machines more can happen that is nobody's request's fault."""


class FleetClient(EngineClient):
    """Takes the fleet over: closing closes it."""

    def __init__(self, fleet: Fleet, text: ModelText | None = None, progress: Progress | None = None) -> None:
        super().__init__(fleet.transport, text, progress, MAX_CRASHES)
        self.fleet = fleet

    @property
    def nodes(self) -> tuple[NodeStatus, ...]:
        """The machines, as they are now."""
        return self.fleet.nodes

    async def close(self) -> None:
        await super().close()
        await self.fleet.close()
