"""The supervisor of a job over ssh: one connection a host, opened together and ended together. Runs in the background of the launching machine."""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import msgspec

from windlass.core.client import Unavailable
from windlass.tasks.launch.hostfile import SshHost, parse_hostfile
from windlass.tasks.launch.job import Job, Settings
from windlass.tasks.launch.node import STOPPED, Description, WriteFile, run_server
from windlass.tasks.launch.render.ssh import connect, node_command, server_command

SECONDS_TO_ASK = 60
SECONDS_BETWEEN_LOOKS = 0.2
SSH_FAILED = 255
ENDED_BY_US = (130, 143)
"""SIGINT and SIGTERM: of nodes that were told to stop because another failed."""


def supervise(description: Description, run: Path, write: WriteFile) -> int:
    job, settings = description.job, description.settings
    hosts = parse_hostfile("\n".join(settings.hosts))
    if job.kind == "serve":
        return run_server(
            job.command, settings, run, write, lambda words: server_command(msgspec.structs.replace(job, command=words), settings)
        )
    if job.kind == "array":
        return _Array(description, hosts).run()
    used = hosts[: job.num_nodes]
    meeting = f"{used[0].reached_at}:{free_port_there(settings, used[0])}" if job.num_nodes > 1 else ""
    nodes = [Connection(description, host, node, meeting) for node, host in enumerate(used)]
    return _together(job, nodes)


def free_port_there(settings: Settings, host: SshHost) -> int:
    import shlex

    there = shlex.join([host.python or settings.python, "-P", "-m", "windlass.tasks.launch.ports", settings.folder])
    done = subprocess.run([*connect(host), there], capture_output=True, text=True, timeout=SECONDS_TO_ASK, check=False)
    if done.returncode or not done.stdout.strip().isdecimal():
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise Unavailable(
            f"{host.name}: {lines[-1] if lines else f'ssh ended with {done.returncode}'}; try `ssh {host.name}` by hand"
        )
    return int(done.stdout)


class Connection:
    """One node of the job. Closing its input ends what runs there, after a checkpoint."""

    def __init__(self, description: Description, host: SshHost, node: int, meeting: str, index: int | None = None) -> None:
        self.host = host
        argv = node_command(description.settings, host, node, meeting)
        if index is not None:
            argv[-1] += f" --index {index}"
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
        )
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.write(msgspec.json.encode(description).decode() + "\n")
            self.process.stdin.flush()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            sys.stdout.write(f"[{self.host.name}] {line}")
            sys.stdout.flush()

    def end(self) -> None:
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()

    def code(self) -> int | None:
        found = self.process.poll()
        if found is not None:
            self._reading.join(5)
        return found


def _together(job: Job, nodes: Sequence[Connection]) -> int:
    """Until all have ended. A node that fails ends the others, unless the run may shrink and enough are left."""
    stop = _stop_asked()
    is_ending = False
    while any(node.code() is None for node in nodes):
        failed = [node for node in nodes if node.code() not in (None, 0, STOPPED)]
        if not is_ending and (stop.is_set() or len(nodes) - len(failed) < (job.min_nodes if job.may_shrink else len(nodes))):
            is_ending = True
            for node in failed:
                print(f"windlass: {node.host.name} {_how(node.code())}; the others are told to save and stop", flush=True)
            for node in nodes:
                node.end()
        stop.wait(SECONDS_BETWEEN_LOOKS) if not stop.is_set() else threading.Event().wait(SECONDS_BETWEEN_LOOKS)
    codes = [node.code() or 0 for node in nodes]
    good = [code for code in codes if code in (0, STOPPED)]
    if job.may_shrink and len(good) >= job.min_nodes:
        return max(good)
    own = [code for code in codes if code not in (0, STOPPED, *ENDED_BY_US)]
    return own[0] if own else max(codes)


def _how(code: int | None) -> str:
    return "is not reached any more" if code == SSH_FAILED else f"failed with exit code {code}"


def _stop_asked() -> threading.Event:
    asked = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        asked.set()

    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(name, ask)
    return asked


class _Array:
    """Values go to whichever host is free."""

    def __init__(self, description: Description, hosts: Sequence[SshHost]) -> None:
        self._description, self._hosts, self._stop = description, hosts, _stop_asked()
        self._todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in range(len(description.job.values)):
            self._todo.put(index)
        self._codes: list[int] = []

    def run(self) -> int:
        threads = [threading.Thread(target=self._work, args=(host,)) for host in self._hosts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return 143 if self._stop.is_set() else max(self._codes, default=0)

    def _work(self, host: SshHost) -> None:
        while not self._stop.is_set():
            try:
                index = self._todo.get_nowait()
            except queue.Empty:
                return
            one = Connection(self._description, host, 0, "", index)
            while one.code() is None:
                if self._stop.wait(SECONDS_BETWEEN_LOOKS):
                    one.end()
                    one.process.wait()
            self._codes.append(one.code() or 0)
            if one.code() == SSH_FAILED:  # its value is for another host
                self._todo.put(index)
                return
