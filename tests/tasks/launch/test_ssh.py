"""`windlass launch`: workers started, listened to and ended; by a stand-in for ssh, and by a real one where there is a server for it."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from free_ports import free_port
from waiting import HUNG_SECONDS, until
from windlass.cli import execute

pytestmark = pytest.mark.multi

# Passes its input on and runs what it is given, as sshd does: the remote end is of another session and does not hear of our signals.
SSH = """#!/bin/sh
while [ "$1" != "--" ]; do shift; done
case "$2" in refused*) echo "Permission denied (publickey)." >&2; exit 255;; esac
exec setsid -w sh -c "$3"
"""
SECRET = "a secret that nobody guesses"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `ssh` is the stand-in, and the secret is."""
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(SSH)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / "cache"))
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text(SECRET)
    return tmp_path


def hostfile(place: Path, *lines: str) -> Path:
    (place / "hosts").write_text("\n".join(lines))
    return place / "hosts"


class Launch:
    def __init__(self, *words: str | Path, program: Sequence[str] = ("-m", "windlass")) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *program, "launch", *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )
        self.said = ""

    def until(self, words: str) -> None:
        assert self.process.stdout is not None
        while words not in self.said:
            line = self.process.stdout.readline()
            assert line, f"ended without {words!r}: {self.said}"
            self.said += line

    def end(self, how: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(how)
        rest, _ = self.process.communicate(timeout=HUNG_SECONDS)
        self.said += rest
        return self.process.returncode


@contextmanager
def launched(*words: str | Path, program: Sequence[str] = ("-m", "windlass")) -> Generator[Launch]:
    launch = Launch(*words, program=program)
    try:
        yield launch
    finally:
        launch.process.kill()
        launch.process.communicate()


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=HUNG_SECONDS).close()
    except OSError:
        return False
    return True


def command_lines() -> str:
    found: list[bytes] = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(process.read_bytes())
        except OSError:
            continue
    return b"\n".join(found).replace(b"\0", b" ").decode(errors="replace")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_come_and_go_with_the_launch(place: Path, how: signal.Signals) -> None:
    first, second = free_port(), free_port()
    hosts = hostfile(place, f"127.0.0.1 port={first}", f"me@localhost address=127.0.0.1 port={second}")
    with launched("--hostfile", hosts, "--secret-file", place / "secret") as launch:
        launch.until("2 workers are up")
        assert f"--workers 127.0.0.1:{first},127.0.0.1:{second} --secret-file {shlex.quote(str(place / 'secret'))}" in launch.said
        assert "[me@localhost]" in launch.said and listens(first) and listens(second)
        assert SECRET not in command_lines() + launch.said
        status = launch.end(how)
        assert status == (-signal.SIGKILL if how is signal.SIGKILL else 0)
    until(lambda: not listens(first) and not listens(second))
    until(lambda: f":{first}" not in command_lines())
    until(lambda: not list(place.glob("tmp.*")))  # the secret's copies


AT_ONCE = "import windlass.cli; from windlass.tasks.launch import ssh; ssh.FIRST_PAUSE_SECONDS = 0.01; windlass.cli.main()"
"""The command line, which waits for a moment only before it starts a worker again."""


def test_a_worker_that_ends_is_started_again(place: Path) -> None:
    port = free_port()
    with launched("--hostfile", hostfile(place, f"127.0.0.1 port={port}"), program=("-c", AT_ONCE)) as launch:
        launch.until("1 worker is up")
        killed = subprocess.run(
            ["pgrep", "-f", f"^{sys.executable} -P -m windlass worker .*:{port}"], capture_output=True, text=True
        )
        os.kill(int(killed.stdout.split()[0]), signal.SIGKILL)
        launch.until("restarting in")
        launch.said = ""
        launch.until("listens at")
        assert launch.end() == 0
    until(lambda: not listens(port))


def test_a_command_has_the_workers_and_ends_them(place: Path) -> None:
    port = free_port()
    with launched("--hostfile", hostfile(place, f"127.0.0.1 port={port}"), "--", "run", "no-such-model") as launch:
        launch.until("windlass: ")
        launch.process.communicate(timeout=HUNG_SECONDS)
        assert launch.process.returncode == 2
    until(lambda: not listens(port))
    assert not list(place.glob("windlass-launch-*")), "its own secret is gone too"


@pytest.mark.parametrize(
    ("lines", "words", "status"),
    [
        (["refused-host"], "refused-host: ssh could not connect or was cut off: Permission denied", 4),
        (["localhost python=/no/such/python"], "python=... in the hostfile", 4),
        (["localhost port=1 address=192.0.2.1"], "localhost: the worker exited with status 2", 4),
    ],
)
def test_what_cannot_be_is_said_and_nothing_is_left(place: Path, lines: list[str], words: str, status: int) -> None:
    port = free_port()
    hosts = hostfile(place, f"127.0.0.1 port={port}", *lines)
    with launched("--hostfile", hosts, "--secret-file", place / "secret") as launch:
        launch.until(words)
        launch.process.communicate(timeout=HUNG_SECONDS)
        assert launch.process.returncode == status and "Traceback" not in launch.said
    assert not listens(port)


@pytest.mark.parametrize(
    ("secret", "words"), [("short", "fewer than 16"), ("two lines of it\nand the other one", "secret_file=PATH")]
)
def test_secrets_that_cannot_be(place: Path, secret: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "secret").write_text(secret)
    assert execute(["launch", "--hostfile", str(hostfile(place, "a")), "--secret-file", str(place / "secret")]) == 2
    assert words in capsys.readouterr().err


def test_a_hostfile_that_cannot_be_read_is_one_line(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["launch", "--hostfile", str(hostfile(place, "127.0.0.1", "a b"))]) == 2
    said = capsys.readouterr().err
    assert "key=value" in said and said.count("\n") == 1


def test_a_dry_run_starts_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["launch", "--hostfile", str(hostfile(place, "box1", "box2 python=/p")), "--dry-run"]) == 0
    assert sum(line.startswith("ssh ") for line in capsys.readouterr().out.splitlines()) == 2


# --- the real one ----------------------------------------------------------------------------------------------------------

SSHD_CONFIG = """
Port {port}
ListenAddress 127.0.0.1
HostKey "{folder}/host_key"
AuthorizedKeysFile "{folder}/key.pub"
PidFile "{folder}/sshd.pid"
StrictModes no
UsePAM no
"""
CLIENT_CONFIG = """#!/bin/sh
exec {ssh} -F /dev/null -i "{folder}/key" -o 'UserKnownHostsFile="{folder}/known"' -o StrictHostKeyChecking=accept-new "$@"
"""


@pytest.fixture
def ssh_port(place: Path) -> Generator[int]:
    """A server of its own, with keys of its own."""
    real = [shutil.which(tool, path="/usr/sbin:/usr/bin:/bin") for tool in ("sshd", "ssh", "ssh-keygen")]
    if not all(real) or os.geteuid() != 0:
        pytest.skip("no sshd, or not root (it must be to make sessions)")
    sshd, ssh, keygen = (str(tool) for tool in real)
    for name in ("host_key", "key"):
        subprocess.run([keygen, "-q", "-t", "ed25519", "-N", "", "-f", str(place / name)], check=True)
    port = free_port()
    (place / "sshd_config").write_text(SSHD_CONFIG.format(port=port, folder=place))
    (place / "bin" / "ssh").write_text(CLIENT_CONFIG.format(ssh=ssh, folder=place))
    Path("/run/sshd").mkdir(exist_ok=True)  # where it locks itself in; it insists
    server = subprocess.Popen([sshd, "-D", "-e", "-f", str(place / "sshd_config")], stderr=subprocess.DEVNULL)
    try:
        until(lambda: listens(port))
        yield port
    finally:
        server.terminate()
        server.wait()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_through_a_real_ssh(place: Path, ssh_port: int, how: signal.Signals) -> None:
    port = free_port()
    hosts = hostfile(place, f"root@127.0.0.1 ssh_port={ssh_port} port={port}")
    with launched("--hostfile", hosts, "--secret-file", place / "secret") as launch:
        launch.until("1 worker is up")
        assert listens(port) and SECRET not in command_lines()
        launch.end(how)
    until(lambda: not listens(port))
    until(lambda: f":{port}" not in command_lines())
