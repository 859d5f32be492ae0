"""`windlass launch workers`: workers on other machines, started by ssh, until Ctrl-C or for the duration of one command."""

from __future__ import annotations

import secrets
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from windlass.core.client import Unavailable
from windlass.errors import BadInput

if TYPE_CHECKING:
    from windlass.tasks.launch.hostfile import SshHost
    from windlass.tasks.launch.ssh import RemoteWorker

EXAMPLES = """Examples:

windlass launch --hostfile hosts --secret-file secret

windlass launch --hostfile hosts -- run ./GLM-4.5-Air-int4 --prompt "Why is the sky blue?"

A hostfile has one machine per line, as ssh knows it, with options: `ada@box2 port=9999 python=/opt/windlass/bin/python cache=/data/windlass`"""

SECONDS_BETWEEN_CHECKS = 0.1
SECONDS_TO_START = 120.0
"""Python may be on a slow network drive."""


def launch(
    command: list[str] = typer.Argument(
        None, metavar="[-- COMMAND...]", help="A windlass command to run with the workers; they end with it."
    ),
    hostfile: Path = typer.Option(..., metavar="FILE", help="File with one machine per line."),
    secret_file: Path | None = typer.Option(
        None, metavar="FILE", help="Shared secret of root and workers; by default a new one for this launch."
    ),
    python: str = typer.Option(
        "", metavar="PATH", help="The interpreter that has Windlass on those machines; by default the path of this one."
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the commands and start nothing."),
) -> int:
    """Start `windlass worker` on other machines by ssh, and end all of them on Ctrl-C.

    Needs ssh keys or an agent; passwords are not asked for. The secret is sent through ssh and is in no command line. A worker that exits is
    restarted; none outlives its connection.
    """
    from windlass.tasks.launch.hostfile import load_hostfile
    from windlass.tasks.launch.ssh import render

    hosts = load_hostfile(hostfile)
    if dry_run:
        for host in hosts:
            print(shlex.join(render(host, python).argv))
        return 0
    with _interruptible(), _secret(secret_file) as (file, secret):
        return _launch(hosts, python, file, secret, command or [])


launch.__doc__ = f"{launch.__doc__}\n\n{EXAMPLES}"


@contextmanager
def _secret(file: Path | None) -> Generator[tuple[Path, str]]:
    """The secret file, for the root, and its contents."""
    if file is not None:
        from windlass.runtime.fleet.protocol.secret import read_secret

        yield file, _as_line(read_secret(file), file)
        return
    with tempfile.TemporaryDirectory(prefix="windlass-launch-") as folder:  # private: mode 0700
        made = Path(folder) / "secret"
        made.touch(0o600)
        made.write_text(secrets.token_urlsafe(32) + "\n")
        yield made, made.read_text().strip()


def _as_line(secret: bytes, file: Path) -> str:
    """The remote shell reads it as one line."""
    try:
        text = secret.decode("ascii")
    except UnicodeDecodeError:
        text = "\n"
    if not text.isprintable():
        raise BadInput(
            f"the secret in {file} is not one line of printable ASCII; copy the file to the machines and name it in the hostfile: secret_file=PATH"
        )
    return text


@contextmanager
def _interruptible() -> Generator[None]:
    """SIGTERM and SIGHUP act like Ctrl-C."""
    names = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(name, signal.default_int_handler) for name in names]
    try:
        yield
    finally:
        for name, handler in zip(names, before, strict=True):
            signal.signal(name, handler)


def _launch(hosts: Sequence[SshHost], python: str, secret_file: Path, secret: str, command: list[str]) -> int:
    from windlass.tasks.launch.hostfile import workers_of
    from windlass.tasks.launch.ssh import RemoteWorker, render

    output = _Output()
    started = [RemoteWorker(host, render(host, python), secret, output) for host in hosts]
    try:
        _wait_up(started)
        arguments = ["--workers", workers_of(hosts), "--secret-file", str(secret_file)]
        if command:
            return _run([*command, *arguments])
        output.plain(f"{_counted(len(hosts))} up; `windlass run MODEL {shlex.join(arguments)}`. Ctrl-C ends the workers")
        _wait_end(started)
    except KeyboardInterrupt:
        output.plain("ending the workers")
        return 0 if not command else 130
    finally:
        _end(started, output)
    return 0


def _counted(number: int) -> str:
    return "1 worker is" if number == 1 else f"{number} workers are"


def _wait_up(started: Sequence[RemoteWorker]) -> None:
    end = time.monotonic() + SECONDS_TO_START
    while not all(one.is_up.is_set() for one in started):
        _raise_failed(started)
        if time.monotonic() > end:
            late = ", ".join(one.host.name for one in started if not one.is_up.is_set())
            raise Unavailable(
                f"{late} did not start within {SECONDS_TO_START:.0f} s; check that `ssh HOST` works and that the machine is not overloaded"
            )
        time.sleep(SECONDS_BETWEEN_CHECKS)


def _wait_end(started: Sequence[RemoteWorker]) -> None:
    """Workers are restarted, so this ends with Ctrl-C, or when all have failed."""
    while any(one.is_running for one in started):
        time.sleep(SECONDS_BETWEEN_CHECKS)
    _raise_failed(started)


def _raise_failed(started: Sequence[RemoteWorker]) -> None:
    if failed := [f"{one.host.name}: {one.failed}" for one in started if one.failed]:
        raise Unavailable("; ".join(failed))


def _end(started: Sequence[RemoteWorker], output: _Output) -> None:
    """All at once. Ignores a second Ctrl-C, which would leave workers behind until their connections time out."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for one in started:
            one.end()
        for one in started:
            if not one.wait():
                output.plain(f"{one.host.name} does not answer; its worker ends when that machine notices the lost connection")
    finally:
        signal.signal(signal.SIGINT, before)


def _run(arguments: list[str]) -> int:
    """In the foreground. Ctrl-C is for the command: it may only stop an answer."""
    import subprocess

    process = subprocess.Popen([sys.executable, "-P", "-m", "windlass", *arguments])
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            if not sys.stdin.isatty():  # then the command did not get it
                process.send_signal(signal.SIGINT)


class _Output:
    """Lines of several threads on standard error."""

    def __init__(self) -> None:
        self._writing = threading.Lock()

    def __call__(self, host: str, line: str) -> None:
        self.plain(f"[{host}] {line}")

    def plain(self, line: str) -> None:
        with self._writing:
            print(line, file=sys.stderr, flush=True)
