"""A root that serves and its workers, each on a host of its own, as a test drives them."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from followed import Followed
from hosts import Hosts

from waiting import HUNG_SECONDS

ROOT = 1
WORKER_PORT, HTTP_PORT = 9998, 8000
RANK = re.compile(r"windlass\.runtime\.engine\.(ranks\.follower|process) ")
"""In the command line of a process that computes."""


class Cluster:
    """Host 1 is the root's, the others have a worker each."""

    def __init__(self, hosts: Hosts, folder: Path, model: Path, program: Sequence[str] = ("-m", "windlass")) -> None:
        """`model`: a folder that only the root's host has. `program`: Python's words for the command line."""
        self.hosts, self.folder, self._model, self._program = hosts, folder, model, program
        self._secret = folder / "secret"
        self._secret.touch(0o600)
        self._secret.write_text("nobody knows what this is\n")
        self.workers: dict[int, Followed] = {}
        self.root: Followed | None = None

    def address(self, number: int) -> str:
        return f"{self.hosts.address(number)}:{WORKER_PORT}"

    def start_worker(self, number: int, wait: bool = True) -> Followed:
        words = [
            "worker",
            "--listen",
            self.address(number),
            "--secret-file",
            self._secret,
            "--cache",
            self.folder / f"cache{number}",
        ]
        found = self.workers[number] = self._start(number, words, f"worker {number}")
        if wait:
            found.until("listens at")
        return found

    def start_root(self, words: Sequence[str] = (), workers: Sequence[int] | None = None) -> Followed:
        """Returns when it answers."""
        numbers = [number for number in self.hosts.numbers if number != ROOT] if workers is None else workers
        given = (
            ["--workers", ",".join(self.address(number) for number in numbers), "--secret-file", str(self._secret)]
            if numbers
            else []
        )
        self.root = self._start(
            ROOT,
            ["serve", self._model, "--port", str(HTTP_PORT), "--no-page", "--quiet", "--device", "cpu", *given, *words],
            "root",
        )
        self._wait_ready()
        return self.root

    def _start(self, number: int, words: Sequence[str | Path], name: str) -> Followed:
        process = self.hosts.start(
            number,
            [sys.executable, "-u", *self._program, *words],
            hidden=None if number == ROOT else self._model,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "WINDLASS_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )
        return Followed(process, name)

    def _wait_ready(self) -> None:
        end = time.monotonic() + HUNG_SECONDS
        assert self.root is not None
        while not self._answers("/ready"):
            assert self.root.process.poll() is None, f"the root ended:\n{self.root.said}"
            assert time.monotonic() < end, f"hung, and not ready:\n{self.said}"
            time.sleep(0.1)

    def _answers(self, path: str) -> bool:
        try:
            with self.connect() as connection:
                connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
                return b" 200 " in connection.recv(4096).partition(b"\r\n")[0]
        except OSError:
            return False

    def connect(self) -> socket.socket:
        """To the root's server, from its own host."""
        return self.hosts.connect(ROOT, "127.0.0.1", HTTP_PORT, HUNG_SECONDS)

    def computing(self, number: int) -> dict[int, str]:
        """Processes of the host that are ranks or engines."""
        return {pid: words for pid, words in self.hosts.commands(number).items() if RANK.search(words + " ")}

    def wait_quiet(self) -> None:
        """Until nothing is left on any host but its worker."""
        end = time.monotonic() + HUNG_SECONDS
        while extra := {number: found for number in self.hosts.numbers if (found := self._extra(number))}:
            assert time.monotonic() < end, f"hung, and still there: {extra}\n{self.said}"
            time.sleep(0.05)

    def _extra(self, number: int) -> dict[int, str]:
        """Whatever its name: a process that was just started still has that of whoever started it."""
        worker = self.workers[number].process.pid if number in self.workers else 0
        return {pid: words for pid, words in self.hosts.commands(number).items() if pid != worker}

    def end_root(self, how: signal.Signals) -> int:
        assert self.root is not None
        self.root.process.send_signal(how)
        return self.root.ended()

    def end_worker(self, number: int, how: signal.Signals = signal.SIGTERM) -> int:
        worker = self.workers.pop(number)
        worker.process.send_signal(how)
        return worker.ended()

    @property
    def said(self) -> str:
        return "\n".join(one.said for one in (self.root, *self.workers.values()) if one is not None)
