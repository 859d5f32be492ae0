"""`windlass serve` in a process of its own: start, wait until ready, stop. It ends with this process, however that ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from windlass.core.client import Unavailable
from windlass.errors import Error
from windlass.runtime.machine.exit_status import describe_exit, last_line
from windlass.runtime.machine.parent_death import kill_with_parent
from windlass.wire.client.connection import HttpConnection, ServerAddress

READY_SECONDS = 3600.0
"""Hundreds of GiB from a slow disk."""
LOOK_SECONDS = 0.1
STOP_SECONDS = 60.0
KEY = "WINDLASS_API_KEY"


class OwnServer:
    """On loopback, as it comes: nothing is set but the port, and what `words` say."""

    def __init__(self, words: Sequence[str]) -> None:
        """`words`: of the command line behind `windlass serve`, the model first."""
        self._words = tuple(words)
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop
        self.url = ""
        self.ready_seconds = 0.0

    async def start(self) -> None:
        """Returns when it is ready. Raises Unavailable with its last line if it ends before."""
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        began = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "windlass", "serve", *self._words, "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={name: value for name, value in os.environ.items() if name != KEY},
            process_group=0,  # Ctrl-C is for us; we stop it
            preexec_fn=_end_with_parent,
        )
        await self._wait_ready(self._process, began)
        self.ready_seconds = time.monotonic() - began

    async def _wait_ready(self, process: subprocess.Popen[bytes], began: float) -> None:
        http = HttpConnection(ServerAddress(self.url), None, READY_SECONDS)
        try:
            while not await _answers(http, f"{self.url}/ready"):
                if process.poll() is not None:
                    raise self._why_ended(process.returncode)
                if time.monotonic() - began > READY_SECONDS:
                    raise Unavailable(f"the server was not ready after {READY_SECONDS:,.0f} s: {last_line(self._log.fileno())}")
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            await http.close()

    def stop(self) -> None:
        """Returns when it has ended; may be called twice."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._log.close()

    def _why_ended(self, status: int) -> Error:
        """With its own exit code: it may have been the input."""
        line = last_line(self._log.fileno()).removeprefix("windlass: ")
        error = Unavailable(line or f"`windlass serve` {describe_exit(status)} before it was ready")
        error.exit_code = status if status in (2, 3) else Unavailable.exit_code
        return error


def _end_with_parent() -> None:
    kill_with_parent(signal.SIGTERM)


async def _answers(http: HttpConnection, url: str) -> bool:
    try:
        await http.get(url)
    except Error:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
