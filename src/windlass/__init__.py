"""Windlass lifts heavy weights: plan, convert, run, serve, evaluate, route and train large open-weight language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windlass.client import AsyncClient, Client

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "__version__"]


def __getattr__(name: str) -> Any:
    """Imported when they are first named: `import windlass` costs nothing."""
    if name in ("AsyncClient", "Client"):
        from windlass import client

        return getattr(client, name)
    raise AttributeError(f"module 'windlass' has no attribute {name!r}")
