"""Opens a Client for a Launch: the engine in a process of its own, or a fleet of ranks over processes and machines."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from windlass.core.launch import Launch
from windlass.errors import MissingExtra
from windlass.open.drafts import with_draft_model

if TYPE_CHECKING:
    from windlass.runtime.engine.client.client import EngineClient
    from windlass.runtime.engine.client.requests import Progress
    from windlass.runtime.fleet.root.epoch import NodeProgress


def require_torch(purpose: str) -> None:
    if find_spec("torch") is None:
        raise MissingExtra("torch", "run", purpose)


def open_client(
    launch: Launch,
    progress: Progress | None = None,
    nodes: Callable[[NodeProgress], None] = lambda _: None,
    notify: Callable[[str], None] = lambda _: None,
) -> EngineClient:
    """It loads with the first request. `nodes`: progress of each machine; `notify`: lines an operator should see."""
    from windlass.runtime.engine.client.client import open_client as open_local
    from windlass.runtime.engine.client.client import with_text

    launch = with_draft_model(launch)
    if launch.is_single:
        return open_local(launch, progress)
    from windlass.open.fleet import open_fleet
    from windlass.runtime.fleet.root.client import FleetClient

    launch, text = with_text(launch)
    return FleetClient(open_fleet(launch, nodes, notify), text, progress)
