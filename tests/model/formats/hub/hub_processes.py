"""Processes that use huggingface_hub, each in an environment of its own: the package reads its environment once, when it is imported.

They are forked from one that has imported what the package needs, which takes most of the time, and then forgotten the package itself.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from subprocesses import LASTING
from waiting import HUNG_SECONDS

SOURCE = Path(__file__).parents[4] / "src"

# For every message, a process that runs its code, and one beside it that tells how that ended. It ends with its socket.
SERVER = """
import json, os, socket, sys
import huggingface_hub, windlass.model.formats.hub.hub, windlass.model.formats.hub.local
from huggingface_hub import HfApi, hf_hub_download, scan_cache_dir, snapshot_download
for name in [name for name in sys.modules if name.split(".")[0] == "huggingface_hub"]:
    del sys.modules[name]

def next_message(connection):
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        if not message:
            sys.exit()
        beside = os.fork()
        if beside == 0:
            return json.loads(message), descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(beside, 0)

def code_to_run(connection):
    message, (output, errors, status) = next_message(connection)
    connection.close()
    if os.fork():  # so that the server need not wait for it
        os._exit(0)
    started = os.fork()
    if started:
        os.close(output), os.close(errors)
        os.write(status, b"%d\\n" % started)
        os.write(status, b"%d\\n" % os.waitstatus_to_exitcode(os.waitpid(started, 0)[1]))
        os._exit(0)
    os.close(status)
    os.dup2(output, 1), os.dup2(errors, 2)
    os.close(output), os.close(errors)
    os.environ.clear()
    os.environ.update(message["environment"])
    sys.argv = ["-c", *message["arguments"]]
    return message["code"]

exec(code_to_run(socket.socket(fileno=int(sys.argv[1]))), {"__name__": "__main__"})
"""


class Process:
    """One that runs; `stdout` can be read while it does."""

    returncode: int | None = None

    def __init__(self, stdout: int, status: int, errors: int) -> None:
        self.stdout = open(stdout)  # noqa: SIM115 - closed by `ended`
        self._status = open(status)  # noqa: SIM115
        self._errors = open(errors)  # noqa: SIM115
        self._pid = int(self._status.readline())

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def ended(self) -> tuple[str, str]:
        """What it printed and said until its end; a process that hangs ends too."""
        hung = threading.Timer(HUNG_SECONDS, self.kill)
        hung.start()
        with self.stdout, self._status, self._errors:
            output, self.returncode = self.stdout.read(), int(self._status.readline())
            self._errors.seek(0)
            trouble = self._errors.read()
        assert hung.is_alive(), f"hung: {output}; {trouble}"
        hung.cancel()
        return output, trouble


@cache
def _server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    pytest.importorskip("huggingface_hub")
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", SERVER, str(there.fileno())]
    started = subprocess.Popen(
        command, env=environment | LASTING, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    there.close()
    return here, started


def stop_server() -> None:
    if _server.cache_info().currsize:
        connection, started = _server()
        connection.close()
        started.wait(HUNG_SECONDS)
        _server.cache_clear()


def start(code: str, *arguments: str, environment: Mapping[str, str]) -> Process:
    (server, _), (output, printed), (status, told) = _server(), os.pipe(), os.pipe()
    with tempfile.TemporaryFile() as errors:
        message = {"code": code, "arguments": arguments, "environment": dict(environment)}
        socket.send_fds(server, [json.dumps(message).encode()], [printed, errors.fileno(), told])
        kept = os.dup(errors.fileno())
    os.close(printed)
    os.close(told)
    return Process(output, status, kept)


def run(code: str, *arguments: str, environment: Mapping[str, str]) -> tuple[int | None, str, str]:
    """How it ended, what it printed, and what it said."""
    process = start(code, *arguments, environment=environment)
    output, trouble = process.ended()
    return process.returncode, output, trouble
