"""Runs programs in the sandbox: one short-lived process each, started with nothing, told everything over a pipe.

A program passes if and only if the judge inside (inside.py) answers with the secret that was made for this one run.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import secrets
import signal
import struct
import sys
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from windlass.core.model import Frozen
from windlass.errors import Error
from windlass.tasks.evaluate.sandbox.seccomp import build_filter
from windlass.units import MIB

INSIDE = Path(__file__).with_name("inside.py")
MAX_RESULT_BYTES = 65_536
LIBRARIES = ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64")
"""Of extension modules of the standard library, wherever a distribution keeps them."""


class NoSandbox(Error):
    """This machine offers less isolation than generated code needs."""


class Program(Frozen):
    source: str
    tests: str
    """Python that raises if the program is wrong. It calls the program's functions by name."""
    context: str = ""
    """Python that runs before the tests, out of the program's reach."""
    entry_point: str = ""
    """The one function that is tested; empty: all that tests use."""


class Limits(Frozen):
    cpu_seconds: int = 10
    """Processor time, so that verdicts do not depend on what else the machine does."""
    wall_seconds: float = 30.0
    memory_bytes: int = 1024 * MIB
    file_bytes: int = 16 * MIB


LIMITS = Limits()


class Outcome(Frozen):
    passed: bool
    why: str


class Sandbox:
    """`anyway`: run even if layers are missing; `missing` then says which."""

    def __init__(self, at_once: int | None = None, limits: Limits = LIMITS, anyway: bool = False) -> None:
        self._limits, self._anyway = limits, anyway
        self._turns = asyncio.Semaphore(at_once or os.cpu_count() or 1)
        self._folder = tempfile.TemporaryDirectory(prefix="windlass-sandbox-")
        self.missing: tuple[str, ...] = ()

    async def check(self) -> None:
        """Raises NoSandbox unless a program can be isolated here."""
        found = await self.run(Program(source="def f():\n    return 1", tests="assert f() == 1"))
        if not found.passed:
            raise NoSandbox(f"programs cannot be run here: {found.why}; use --skip-execution")

    async def run(self, program: Program) -> Outcome:
        async with self._turns:
            return await self._run(program)

    def close(self) -> None:
        self._folder.cleanup()

    @property
    def folder(self) -> str:
        """Where programs mount their root, each in a namespace of its own; on the command line of all of them."""
        return self._folder.name

    @property
    def layers(self) -> str:
        """For the report."""
        if self.missing:
            return f"weak: without {'; '.join(self.missing)}"
        return "namespaces (user, pid, net, mount, ipc, uts), empty root, seccomp, no capabilities, rlimits"

    async def _run(self, program: Program) -> Outcome:
        secret = secrets.token_hex(16)
        message = _frame(self._job(program)) + _frame(_tests(program, secret))
        process = await asyncio.create_subprocess_exec(
            getattr(sys, "_base_executable", None) or sys.executable, "-I", "-S", "-B", str(INSIDE), self.folder,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            env={}, cwd="/", start_new_session=True, limit=MAX_RESULT_BYTES,
        )  # fmt: skip
        try:
            async with asyncio.timeout(self._limits.wall_seconds):
                return self._outcome(await _exchange(process, message), secret)
        except TimeoutError:
            return Outcome(passed=False, why=f"not finished after {self._limits.wall_seconds:g} s")
        finally:
            await _end(process)

    def _job(self, program: Program) -> dict[str, Any]:
        limits = self._limits
        common = {"CPU": limits.cpu_seconds, "FSIZE": limits.file_bytes, "CORE": 0, "NOFILE": 64}
        return {
            "program": program.source,
            "readable": readable_folders(),
            "limits": {**common, "AS": limits.memory_bytes, "STACK": 64 * MIB},
            "judge_limits": {**common, "CPU": 2 * limits.cpu_seconds, "AS": 2 * limits.memory_bytes},
            "filter": build_filter().hex() if has_filter() else "",
            "anyway": self._anyway,
        }

    def _outcome(self, reply: dict[str, Any], secret: str) -> Outcome:
        if "unavailable" in reply:
            raise NoSandbox(
                f"generated code cannot be isolated on this machine ({reply['unavailable']}); use --skip-execution, another machine, "
                "or, if the machine may be lost, --execute-anyway"
            )
        self.missing = tuple(reply.get("missing", ()))
        if secrets.compare_digest(str(reply.get("secret", "")), secret):
            return Outcome(passed=True, why="all tests passed")
        why = str(reply.get("why", "no verdict"))[:500]
        return Outcome(passed=False, why=why.encode(errors="backslashreplace").decode())  # a lone surrogate fits in no journal


def has_filter() -> bool:
    return sys.platform == "linux" and platform.machine() == "x86_64"


def readable_folders() -> list[str]:
    """The interpreter's standard library and the system's shared libraries; nothing else is there."""
    found = [sysconfig.get_path("stdlib"), *LIBRARIES]
    folders = [str(Path(folder).resolve()) for folder in found if Path(folder).is_dir()]
    return sorted(set(folders))


async def _end(process: asyncio.subprocess.Process) -> None:
    """The program's process ends with the judge's: its parent-death signal is SIGKILL."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)  # `process.kill()` polls first, and races with asyncio's own waiting
    await process.wait()


def _tests(program: Program, secret: str) -> dict[str, str]:
    return {"tests": program.tests, "context": program.context, "entry_point": program.entry_point, "secret": secret}


def _frame(message: dict[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    return struct.pack(">I", len(body)) + body


async def _exchange(process: asyncio.subprocess.Process, message: bytes) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    with suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(message)
        await process.stdin.drain()
        process.stdin.close()
    found = await process.stdout.read(4)
    try:
        (size,) = struct.unpack(">I", found)
        return json.loads(await process.stdout.readexactly(min(size, MAX_RESULT_BYTES)))
    except (struct.error, ValueError, asyncio.IncompleteReadError):
        return {"why": "the judge ended without a verdict (CPU time or memory)"}
