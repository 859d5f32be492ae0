"""Workers on other machines by ssh: the command for each (pure), and a life in which they are started, listened to and ended.

A worker lives as long as its ssh connection: over there a guard stands in front of it whose standard input is the connection. So nothing is
left behind, whether the launch is interrupted, killed, or the network goes. The secret goes through the connection, into a file that is
removed with the worker; it is in no command line.
"""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from windlass.launch.command import Command
from windlass.launch.guard import SECONDS_TO_END
from windlass.launch.hostfile import Host, join_address

LISTENS = "listens at"
"""What a worker says when it can be reached."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 30.0
SECONDS_OF_PEACE = 60.0
"""A worker that has lived so long is started anew at once."""
NO_CONNECTION = 255
"""ssh's own exit status."""

# A shell of any kind is given one line; it starts this. `read` takes no byte more than the line, so the guard gets the rest of standard input:
# nothing, and its end. Signals are for the guard, which ignores them: the folder is removed when it has ended.
WITH_SECRET = """
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
trap : HUP INT TERM
IFS= read -r secret || exit 1
(umask 077 && printf '%s\\n' "$secret" > "$folder/secret") || exit 1
python=$1; shift
"$python" -P -m windlass.launch.guard "$python" -P -m windlass worker --secret-file "$folder/secret" "$@"
"""
WITHOUT_SECRET = """
python=$1; shift
exec "$python" -P -m windlass.launch.guard "$python" -P -m windlass worker "$@"
"""

Notify = Callable[[str, str], None]
"""Is given the name of a host and a line about it."""


def render(host: Host, python: str = "", ssh: Sequence[str] = ("ssh",)) -> Command:
    """`python`: where the hostfile names none; empty: the path that Python has here."""
    options = [
        "-T",
        "-o",
        "BatchMode=yes",
        "-o",
        "ConnectTimeout=10",
        "-o",
        "ServerAliveInterval=5",
        "-o",
        "ServerAliveCountMax=3",
    ]
    if host.ssh_port is not None:
        options += ["-p", str(host.ssh_port)]
    script = WITHOUT_SECRET if host.secret_file else WITH_SECRET
    there = ["sh", "-c", script.strip(), "windlass-worker", host.python or python or sys.executable, *worker_words(host)]
    return Command(argv=(*ssh, *options, "--", host.name, shlex.join(there)), env={})


def worker_words(host: Host) -> list[str]:
    """Of `windlass worker`, but for a secret that is handed over."""
    options = (
        ("--secret-file", host.secret_file),
        ("--interface", host.interface),
        ("--device", host.device),
        ("--cache", host.cache),
        ("--cache-size", host.cache_size),
        ("--model-dir", host.model_dir),
    )
    given = [word for name, value in options if value for word in (name, value)]
    return ["--listen", join_address(host.reached_at, host.port), *given]


class Launched:
    """The worker of one host, started again whenever it ends. A thread of its own follows it."""

    def __init__(self, host: Host, command: Command, secret: str, notify: Notify) -> None:
        self.host, self._command, self._secret, self._notify = host, command, secret, notify
        self.is_up = threading.Event()
        """It listens, or has: what fails before is not tried again."""
        self.failed = ""
        self._ending = threading.Event()
        self._changing = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> None:
        """Asks; `wait` waits. The connection's input closes, and with it the worker."""
        with self._changing:
            self._ending.set()
            if self._process is not None and self._process.stdin is not None:
                with contextlib.suppress(OSError):
                    self._process.stdin.close()

    def wait(self) -> bool:
        """Whether it ended as it should: a host that cannot be reached any more cannot say so."""
        self._thread.join(2 * SECONDS_TO_END + 5)
        if self._thread.is_alive() and self._process is not None:
            self._process.kill()
            self._thread.join(SECONDS_TO_END)
            return False
        return True

    def _live(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self._ending.is_set():
            began = time.monotonic()
            status, words = self._once()
            if self._ending.is_set():
                return
            if not self.is_up.is_set():
                self.failed = why(status, words, self._command)
                return
            pause = FIRST_PAUSE_SECONDS if time.monotonic() - began > SECONDS_OF_PEACE else min(2 * pause, LONGEST_PAUSE_SECONDS)
            self._notify(self.host.name, f"{why(status, words, self._command)}; started again in {pause:.0f} s")
            self._ending.wait(pause)

    def _once(self) -> tuple[int, str]:
        """One connection, to its end: its status and last words."""
        with self._changing:
            if self._ending.is_set():
                return 0, ""
            try:
                self._process = _start(self._command)
            except OSError as error:
                return 127, f"{self._command.argv[0]} cannot be started: {error.strerror}"
        process = self._process
        assert process.stdin is not None and process.stderr is not None
        with contextlib.suppress(OSError):  # a connection that is refused reads nothing
            process.stdin.write("" if self.host.secret_file else f"{self._secret}\n")
            process.stdin.flush()
        last = ""
        with process.stderr as lines:
            for line in lines:
                last = line.strip() or last
                if LISTENS in line:
                    self.is_up.set()
                self._notify(self.host.name, line.rstrip())
        return process.wait(), last


def _start(command: Command) -> subprocess.Popen[str]:
    """In a group of its own, so that Ctrl-C in a terminal is ours to pass on."""
    return subprocess.Popen(
        command.argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        process_group=0,
    )


def why(status: int, words: str, command: Command) -> str:
    """Why a worker ended, from ssh's exit status."""
    said = f": {words}" if words else ""
    if status == NO_CONNECTION:
        return (
            f"ssh got no connection, or lost it{said} (keys, not passwords: try `ssh -o BatchMode=yes {command.argv[-2]} true`)"
        )
    if status == 127:
        return f"a program is missing there{said} (python=... in the hostfile names the interpreter that has Windlass)"
    return f"the worker ended with status {status}{said}"
