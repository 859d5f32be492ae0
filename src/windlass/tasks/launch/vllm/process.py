"""A vLLM server process: start, wait until healthy, watch, end. Knows no plan and no flags."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from windlass.core.client import Unavailable
from windlass.runtime.machine.exit_status import describe_exit
from windlass.tasks.launch.command import Command
from windlass.tasks.launch.guard import SECONDS_TO_END

SECONDS_TO_START = 3600.0
"""Hundreds of GiB from a slow disk, and the first compilation of kernels."""
SECONDS_BETWEEN_CHECKS = 0.25
HEALTH_SECONDS = 5.0
TAIL_BYTES = 64 * 1024
KEPT_LOGS = 10
MAX_CHARACTERS, MAX_PROGRESS = 300, 120

Notify = Callable[[str], None]
"""Gets what vLLM is doing, whenever that changes."""

_PREFIX = re.compile(r"^(\([^()]*\)\s*)?((INFO|WARNING|ERROR|DEBUG|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d (\[[^\]]*\] )?)?")
_BUSY = re.compile(r"\bINFO \d\d-\d\d |%\|| Completed \| ")
"""Its log lines, and its progress bar of files read."""
_ERROR = re.compile(r"^[\w.]*(Error|Exception|Interrupt): .")
_ECHO = "Engine core initialization failed"
"""Logged by the API process when its engine failed: the cause is above it."""


class VllmServer:
    """A running server. It ends with this process, however that ends; `close` ends it now."""

    def __init__(self, process: subprocess.Popen[bytes], base_url: str, log: Path, notes: tuple[str, ...] = ()) -> None:
        self.process, self.base_url, self.log, self.notes = process, base_url, log, notes
        self._is_closed = False

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    async def wait_healthy(self, notify: Notify = lambda _: None, seconds: float = SECONDS_TO_START) -> None:
        """Returns when it answers. Raises Unavailable, with its last error, if it exits or takes too long, and closes it."""
        end, last = time.monotonic() + seconds, ""
        try:
            while not await asyncio.to_thread(_answers, self.base_url):
                if not self.is_alive:
                    raise self.why_ended()
                if time.monotonic() > end:
                    raise Unavailable(f"vLLM did not become healthy within {seconds:,.0f} s; see its log, {self.log}")
                line = progress(_tail(self.log))
                if line != last:
                    notify(line)
                last = line
                await asyncio.sleep(SECONDS_BETWEEN_CHECKS)
        except (Exception, asyncio.CancelledError):  # cancellation too must leave no process behind
            await asyncio.to_thread(self.close)  # may take seconds; do not block the event loop
            raise

    def why_ended(self) -> Unavailable:
        error = cause(_tail(self.log))
        status = self.process.poll()
        how = "is still running" if status is None else describe_exit(status)
        return Unavailable(f"vLLM {how}: {error or 'no output'}; see its log, {self.log}")

    def close(self) -> None:
        """Returns when all its processes have ended. May be called twice, and from any thread."""
        if self._is_closed:
            return
        self._is_closed = True
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(2 * SECONDS_TO_END + 5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start(command: Command, *, logs: Path | None = None) -> VllmServer:
    """Does not wait for it. Its output goes to a new file in `logs`, else in the temporary directory."""
    log = _new_log(logs)
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "windlass.tasks.launch.guard", *command.argv],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | command.env,
            process_group=0,
        )
    return VllmServer(process, base_url(command), log, command.notes)


def base_url(command: Command) -> str:
    """From its own flags."""
    arguments = list(command.argv)
    host, port = (arguments[arguments.index(flag) + 1] for flag in ("--host", "--port"))
    return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"


def free_port() -> int:
    """Unused at the moment."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _new_log(folder: Path | None) -> Path:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for old in sorted(folder.glob("vllm-*.log"))[: -KEPT_LOGS + 1]:  # names start with the time
            old.unlink(missing_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f"vllm-{time.strftime('%Y%m%d-%H%M%S')}-", suffix=".log", dir=folder)
    os.close(descriptor)  # mkstemp: readable by its owner only
    return Path(name)


def _answers(url: str) -> bool:
    """/health needs no key, and returns 503 if the engine died."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=HEALTH_SECONDS)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


# --- its log ---------------------------------------------------------------------------------------------------------


def _tail(log: Path) -> str:
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(file.seek(0, 2) - TAIL_BYTES, 0))
        return file.read().decode(errors="replace")
    return ""


def _lines(text: str) -> list[str]:
    """Without log prefixes; a progress bar is many lines."""
    plain = (_PREFIX.sub("", line.strip(), count=1).strip() for line in re.split(r"[\r\n]+", text))
    return [line for line in plain if line]


def progress(text: str) -> str:
    """The last line about what it is doing: no warnings, and no output of other libraries."""
    busy = [line for line in re.split(r"[\r\n]+", text) if _BUSY.search(line)]
    return last_line(busy[-1])[:MAX_PROGRESS] if busy else ""


def last_line(text: str) -> str:
    return next(iter(reversed(_lines(text))), "")[:MAX_CHARACTERS]


def cause(text: str) -> str:
    """The last error that is not caused by another one; else the last line."""
    errors = [line for line in _lines(text) if _ERROR.match(line) and _ECHO not in line]
    return errors[-1][:MAX_CHARACTERS] if errors else last_line(text)
