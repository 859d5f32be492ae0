"""An engine that exists already, run by a thread of this process instead of a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from queue import SimpleQueue

from windlass.core.client import Unavailable
from windlass.core.request import Info
from windlass.runtime.engine.client.client import EngineClient
from windlass.runtime.engine.client.transport import Lost, Receive
from windlass.runtime.engine.engine import Engine
from windlass.runtime.engine.loop import EngineLoop
from windlass.runtime.engine.protocol import Command, EngineFailed, EngineReady, Report, describe_error
from windlass.runtime.weights.text.files import ModelText


class InProcessClient(EngineClient):
    """Takes the engine over."""

    def __init__(self, engine: Engine, info: Info, text: ModelText | None = None) -> None:
        super().__init__(lambda: ThreadTransport(engine, info), text)


class ThreadTransport:
    """Closing closes the engine."""

    def __init__(self, engine: Engine, info: Info) -> None:
        self._engine, self._info = engine, info
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def open(self, receive: Receive, lost: Lost) -> None:
        loop = asyncio.get_running_loop()

        def send(report: Report) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is gone, and whoever waited with it
                loop.call_soon_threadsafe(receive, report)

        def run() -> None:
            try:
                send(EngineReady(self._info))
                EngineLoop(self._engine, self._info, send).run(self._take)
            except Exception as error:  # noqa: BLE001 - the outermost edge of the thread
                send(EngineFailed(**describe_error(error)))
            finally:
                self._engine.close()
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(lost, Unavailable("the engine was closed"))

        self._thread = threading.Thread(target=run, name="windlass-engine", daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        self._commands.put(command)

    def kill(self) -> None:
        """A thread cannot be killed."""

    async def close(self) -> None:
        self._commands.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _take(self, wait: bool) -> list[Command] | None:
        found: list[Command] = []
        while (wait and not found) or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return None
            found.append(command)
        return found
