"""The transport to the engine of one epoch, from the request for it to its end."""

from __future__ import annotations

import asyncio
from typing import Protocol

from windlass.errors import Error
from windlass.runtime.engine.client.transport import EngineTransport, Lost, Receive
from windlass.runtime.engine.protocol import Command, Report


class EngineSource(Protocol):
    """Who starts and stops engines: the fleet."""

    def request_engine(self, transport: FleetTransport) -> None: ...

    def release_engine(self, transport: FleetTransport) -> None: ...

    def engine_reported(self, transport: FleetTransport, report: Report) -> Report | None:
        """The report to pass on; None: none."""
        ...

    def engine_lost(self, transport: FleetTransport, error: Error) -> None: ...


class FleetTransport:
    """An EngineTransport that is opened before its engine exists."""

    def __init__(self, fleet: EngineSource) -> None:
        self._fleet = fleet
        self._engine: EngineTransport | None = None
        self._is_over = False

    def open(self, receive: Receive, lost: Lost) -> None:
        self._receive, self._lost = receive, lost
        self._fleet.request_engine(self)

    def attach(self, engine: EngineTransport) -> None:
        """The engine has been started."""
        if self._is_over:
            return
        self._engine = engine
        engine.open(self._on_report, lambda error: self._fleet.engine_lost(self, error))

    def send(self, command: Command) -> None:
        if self._engine is not None:
            self._engine.send(command)

    def kill(self) -> None:
        if self._engine is not None:
            self._engine.kill()

    async def close(self) -> None:
        self._is_over = True
        self._fleet.release_engine(self)
        if self._engine is not None:
            self._engine.kill()
            await self._engine.close()

    def fail(self, error: Error) -> None:
        """Reports that the engine is lost; nothing comes after it."""
        if not self._is_over:
            self._is_over = True
            asyncio.get_running_loop().call_soon(self._lost, error)  # not from within the call that led to it

    def _on_report(self, report: Report) -> None:
        passed_on = None if self._is_over else self._fleet.engine_reported(self, report)
        if passed_on is not None:
            self._receive(passed_on)
