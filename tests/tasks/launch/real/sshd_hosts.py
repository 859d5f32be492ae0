"""Real sshd, one in each of `hosts_on_one_box`, with keys of its own. Needs root and openssh-server."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from hosts_on_one_box import Hosts, run
from hosts_on_one_box import missing as no_hosts

CONFIG = """
HostKey "{folder}/host_key"
AuthorizedKeysFile "{folder}/key.pub"
PidFile none
StrictModes no
PasswordAuthentication no
PermitRootLogin yes
UsePAM no
Port 22
"""
CLIENT = """
Host *
  IdentityFile "{folder}/key"
  UserKnownHostsFile "{folder}/known"
  StrictHostKeyChecking no
  LogLevel ERROR
{hosts}
"""


def missing() -> str:
    return no_hosts() or ("" if Path("/usr/sbin/sshd").exists() and shutil.which("ssh") else "openssh-server is not installed")


class SshHosts:
    """`ssh -F config NAME` reaches each; `bin/ssh` in the folder does that by itself."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.folder, self.hosts = folder, Hosts(folder, names)
        Path("/run/sshd").mkdir(exist_ok=True)
        for key in ("host_key", "key"):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
        (folder / "sshd_config").write_text(CONFIG.format(folder=folder))
        entries = "\n".join(f"Host {name}\n  HostName {address}" for name, address in self.hosts.addresses.items())
        (folder / "config").write_text(CLIENT.format(folder=folder, hosts=entries))
        self.bin = folder / "bin"
        self.bin.mkdir()
        (self.bin / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F "{folder}/config" "$@"\n')
        (self.bin / "ssh").chmod(0o755)
        self._servers = [self._start(name) for name in names]
        for address in self.hosts.addresses.values():
            _await(address)

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        argv = self.hosts.inside(name, "/usr/sbin/sshd", "-D", "-e", "-f", str(self.folder / "sshd_config"), own_sys=True)
        with (self.folder / f"sshd-{name}.log").open("wb") as log:
            return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0)

    def processes(self, name: str) -> list[str]:
        """Command lines in that host's network namespace, without sshd's own."""
        pids = run("ip", "netns", "pids", self.hosts.namespace(name), check=False).stdout.split()
        lines = [
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            for pid in pids
            if Path(f"/proc/{pid}").exists()
        ]
        return [line for line in lines if line and "sshd" not in line]

    def server_pid(self, name: str) -> int:
        """Of its sshd, which lives in the host's own namespaces."""
        return self._servers[self.hosts.names.index(name)].pid

    def put(self, name: str, cgroup: Path) -> None:
        """All that runs there, and what will, under another cgroup."""
        for pid in run("ip", "netns", "pids", self.hosts.namespace(name)).stdout.split():
            with contextlib.suppress(ProcessLookupError):
                (cgroup / "cgroup.procs").write_text(pid)

    def lose(self, name: str) -> None:
        """The whole host dies."""
        for pid in run("ip", "netns", "pids", self.hosts.namespace(name), check=False).stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        run("ip", "-n", self.hosts.namespace(name), "link", "set", "eth0", "down", check=False)

    def close(self) -> None:
        for name in self.hosts.names:
            for pid in run("ip", "netns", "pids", self.hosts.namespace(name), check=False).stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        for server in self._servers:
            server.wait()
        self.hosts.close()


def _await(address: str) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection((address, 22), timeout=1):
            return
        time.sleep(0.1)
    raise AssertionError(f"hung: no sshd at {address}")
