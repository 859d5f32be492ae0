"""`windlass launch`: workers on other machines, started by ssh, until Ctrl-C or for the time of one command."""

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
    from windlass.launch.hostfile import Host
    from windlass.launch.ssh import Launched

EXAMPLES = """Examples:

windlass launch --hostfile hosts --secret-file secret

windlass launch --hostfile hosts -- run ./GLM-4.5-Air-int4 --prompt "Why is the sky blue?"

A hostfile has a machine a line, as ssh knows it, and what differs there: `ada@box2 port=9999 python=/opt/windlass/bin/python cache=/data/windlass`"""

SECONDS_BETWEEN_LOOKS = 0.1
SECONDS_TO_START = 120.0
"""Python from a network drive that wakes up first."""


def launch(
    command: list[str] = typer.Argument(
        None, metavar="[-- COMMAND...]", help="A command of windlass to run with the workers; they end with it."
    ),
    hostfile: Path = typer.Option(..., metavar="FILE", help="The machines, one a line."),
    secret_file: Path | None = typer.Option(
        None, metavar="FILE", help="What root and workers share; without it a new one, for this launch alone."
    ),
    python: str = typer.Option(
        "", metavar="PATH", help="The interpreter there that has Windlass; without it the path it has here."
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the commands and start nothing."),
) -> int:
    """Start `windlass worker` on other machines by ssh, and end all of them on Ctrl-C.

    Needs keys or an agent: nobody is asked for a password. The secret goes through ssh and is in no command line. A worker that ends is started
    again; none outlives its connection.
    """
    from windlass.launch.hostfile import parse_hostfile
    from windlass.launch.ssh import render

    hosts = parse_hostfile(_read(hostfile), str(hostfile))
    if dry_run:
        for host in hosts:
            print(shlex.join(render(host, python).argv))
        return 0
    with _interruptible(), _secret(secret_file) as (file, secret):
        return _launch(hosts, python, file, secret, command or [])


launch.__doc__ = f"{launch.__doc__}\n\n{EXAMPLES}"


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError as error:
        raise BadInput(f"the hostfile {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadInput(f"the hostfile {file} is no text") from None


@contextmanager
def _secret(file: Path | None) -> Generator[tuple[Path, str]]:
    """The file, for the root, and what is in it."""
    if file is not None:
        from windlass.fleet.protocol.secret import read_secret

        yield file, _as_line(read_secret(file), file)
        return
    with tempfile.TemporaryDirectory(prefix="windlass-launch-") as folder:  # ours alone: mode 0700
        made = Path(folder) / "secret"
        made.touch(0o600)
        made.write_text(secrets.token_urlsafe(32) + "\n")
        yield made, made.read_text().strip()


def _as_line(secret: bytes, file: Path) -> str:
    """A shell reads it there, by the line."""
    try:
        text = secret.decode("ascii")
    except UnicodeDecodeError:
        text = "\n"
    if not text.isprintable():
        raise BadInput(
            f"the secret in {file} is not one line of plain characters; copy it to the machines and name it there: secret_file=PATH"
        )
    return text


@contextmanager
def _interruptible() -> Generator[None]:
    """SIGTERM and SIGHUP are as good as Ctrl-C."""
    names = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(name, signal.default_int_handler) for name in names]
    try:
        yield
    finally:
        for name, handler in zip(names, before, strict=True):
            signal.signal(name, handler)


def _launch(hosts: Sequence[Host], python: str, secret_file: Path, secret: str, command: list[str]) -> int:
    from windlass.launch.hostfile import workers_of
    from windlass.launch.ssh import Launched, render

    notify = _Lines()
    started = [Launched(host, render(host, python), secret, notify) for host in hosts]
    try:
        _wait_up(started)
        words = ["--workers", workers_of(hosts), "--secret-file", str(secret_file)]
        if command:
            return _run([*command, *words])
        notify.plain(f"{_counted(len(hosts))} up; `windlass run MODEL {shlex.join(words)}`. Ctrl-C ends what was started")
        _wait_end(started)
    except KeyboardInterrupt:
        notify.plain("ending the workers")
        return 0 if not command else 130
    finally:
        _end(started, notify)
    return 0


def _counted(number: int) -> str:
    return "1 worker is" if number == 1 else f"{number} workers are"


def _wait_up(started: Sequence[Launched]) -> None:
    end = time.monotonic() + SECONDS_TO_START
    while not all(one.is_up.is_set() for one in started):
        _raise_failed(started)
        if time.monotonic() > end:
            late = ", ".join(one.host.name for one in started if not one.is_up.is_set())
            raise Unavailable(
                f"no word from {late} after {SECONDS_TO_START:.0f} s; does `ssh HOST` work, and is the machine very busy?"
            )
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _wait_end(started: Sequence[Launched]) -> None:
    """They are started again and again, so there is no end but Ctrl-C."""
    while any(one.is_running for one in started):
        time.sleep(SECONDS_BETWEEN_LOOKS)
    _raise_failed(started)


def _raise_failed(started: Sequence[Launched]) -> None:
    if failed := [f"{one.host.name}: {one.failed}" for one in started if one.failed]:
        raise Unavailable("; ".join(failed))


def _end(started: Sequence[Launched], notify: _Lines) -> None:
    """All at once, and not twice: a second Ctrl-C would leave some behind for as long as their connections live."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for one in started:
            one.end()
        for one in started:
            if not one.wait():
                notify.plain(
                    f"{one.host.name} does not answer; its worker ends when the machine sees that the connection is gone"
                )
    finally:
        signal.signal(signal.SIGINT, before)


def _run(words: list[str]) -> int:
    """In front of this terminal. Ctrl-C is the command's: it may only stop an answer."""
    import subprocess

    process = subprocess.Popen([sys.executable, "-P", "-m", "windlass", *words])
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            if not sys.stdin.isatty():  # then the command did not get it
                process.send_signal(signal.SIGINT)


class _Lines:
    """Of several threads, on standard error."""

    def __init__(self) -> None:
        self._writing = threading.Lock()

    def __call__(self, host: str, line: str) -> None:
        self.plain(f"[{host}] {line}")

    def plain(self, line: str) -> None:
        with self._writing:
            print(line, file=sys.stderr, flush=True)
