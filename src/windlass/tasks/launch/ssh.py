"""Workers on other machines by ssh: the command for each (pure), and a supervisor that starts, watches and ends it.

A worker lives as long as its ssh connection: on the remote side it runs under a guard whose standard input is the connection. So nothing
is left behind if the launch is interrupted or killed, or the network fails. The secret goes through the connection into a file that is
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

from windlass.tasks.launch.command import Command
from windlass.tasks.launch.guard import SECONDS_TO_END
from windlass.tasks.launch.hostfile import SshHost, join_address

LISTENS = "listens at"
"""In the worker's log line once it accepts connections."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 30.0
STABLE_SECONDS = 60.0
"""After so long the restart backoff is reset."""
SSH_FAILED = 255
"""ssh's exit status for its own errors."""

# The remote login shell, of any kind, runs this with sh. `read` consumes only its line, so the guard gets the rest of standard input:
# nothing, then end of file. The traps keep the shell alive until the guard has ended, so that the folder is removed.
WITH_SECRET = """
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
trap : HUP INT TERM
IFS= read -r secret || exit 1
(umask 077 && printf '%s\\n' "$secret" > "$folder/secret") || exit 1
python=$1; shift
"$python" -P -m windlass.tasks.launch.guard "$python" -P -m windlass worker --secret-file "$folder/secret" "$@"
"""
WITHOUT_SECRET = """
python=$1; shift
exec "$python" -P -m windlass.tasks.launch.guard "$python" -P -m windlass worker "$@"
"""

Notify = Callable[[str, str], None]
"""(host, line)"""


def render(host: SshHost, python: str = "", ssh: Sequence[str] = ("ssh",)) -> Command:
    """`python`: if the hostfile names none; empty: the path of this interpreter."""
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
    there = ["sh", "-c", script.strip(), "windlass-worker", host.python or python or sys.executable, *worker_arguments(host)]
    return Command(argv=(*ssh, *options, "--", host.name, shlex.join(there)), env={})


def worker_arguments(host: SshHost) -> list[str]:
    """Options of `windlass worker`, without a secret that is sent through ssh."""
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


class RemoteWorker:
    """The worker of one host, restarted whenever it ends, watched by a thread."""

    def __init__(self, host: SshHost, command: Command, secret: str, notify: Notify) -> None:
        self.host, self._command, self._secret, self._notify = host, command, secret, notify
        self.is_up = threading.Event()
        """It accepted connections once; before that a failure is final."""
        self.failed = ""
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._supervise, daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> None:
        """Closes the connection's input, which ends the worker; `wait` waits for it."""
        with self._lock:
            self._ending.set()
            if self._process is not None and self._process.stdin is not None:
                with contextlib.suppress(OSError):
                    self._process.stdin.close()

    def wait(self) -> bool:
        """Whether it ended in order; False: the host does not answer, and ssh was killed."""
        self._thread.join(2 * SECONDS_TO_END + 5)
        if self._thread.is_alive() and self._process is not None:
            self._process.kill()
            self._thread.join(SECONDS_TO_END)
            return False
        return True

    def _supervise(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self._ending.is_set():
            began = time.monotonic()
            status, last_line = self._connect_once()
            if self._ending.is_set():
                return
            if not self.is_up.is_set():
                self.failed = exit_reason(status, last_line, self._command)
                return
            pause = FIRST_PAUSE_SECONDS if time.monotonic() - began > STABLE_SECONDS else min(2 * pause, LONGEST_PAUSE_SECONDS)
            self._notify(self.host.name, f"{exit_reason(status, last_line, self._command)}; restarting in {pause:.0f} s")
            self._ending.wait(pause)

    def _connect_once(self) -> tuple[int, str]:
        """One connection, to its end: ssh's exit status and the last line."""
        with self._lock:
            if self._ending.is_set():
                return 0, ""
            try:
                self._process = _start(self._command)
            except OSError as error:
                return 127, f"cannot start {self._command.argv[0]}: {error.strerror}"
        process = self._process
        assert process.stdin is not None and process.stderr is not None
        with contextlib.suppress(OSError):  # a refused connection reads nothing
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
    """In its own process group, so that Ctrl-C does not reach ssh."""
    return subprocess.Popen(
        command.argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        process_group=0,
    )


def exit_reason(status: int, last_line: str, command: Command) -> str:
    suffix = f": {last_line}" if last_line else ""
    if status == SSH_FAILED:
        return f"ssh could not connect or was cut off{suffix} (it needs keys, not passwords: try `ssh -o BatchMode=yes {command.argv[-2]} true`)"
    if status == 127:
        return f"a program was not found there{suffix} (python=... in the hostfile names the interpreter that has Windlass)"
    return f"the worker exited with status {status}{suffix}"
