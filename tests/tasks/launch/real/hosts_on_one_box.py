"""Several hosts on one machine: network namespaces on a bridge, each with a host name and an /etc/hosts of its own. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path


def missing() -> str:
    """Why it cannot be had here; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    lacking = [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]
    return f"{', '.join(lacking)} not installed" if lacking else ""


def run(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=check)


class Hosts:
    """`names` get the addresses 10.x.y.1 and on, in a network of this process's own; this machine has the last but one."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.names, self._tag = names, f"{os.getpid() % 10000}"
        self.bridge = f"wb{self._tag}"
        network = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
        self.control = f"{network}.254"
        self.addresses = {name: f"{network}.{number}" for number, name in enumerate(names, start=1)}
        self.hosts_file = folder / "hosts-file"
        lines = ["127.0.0.1 localhost", f"{self.control} {os.uname().nodename} control"]
        self.hosts_file.write_text("\n".join([*lines, *(f"{address} {name}" for name, address in self.addresses.items())]) + "\n")
        self._make()

    def namespace(self, name: str) -> str:
        return f"w{self._tag}{name}"

    def _make(self) -> None:
        run("ip", "link", "add", self.bridge, "type", "bridge")
        run("ip", "addr", "add", f"{self.control}/24", "dev", self.bridge)
        run("ip", "link", "set", self.bridge, "up")
        for number, (name, address) in enumerate(self.addresses.items(), start=1):
            space, peer = self.namespace(name), f"wp{self._tag}{number}"
            run("ip", "netns", "add", space)
            run("ip", "link", "add", peer, "type", "veth", "peer", "name", "eth0", "netns", space)
            run("ip", "link", "set", peer, "master", self.bridge, "up")
            run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            run("ip", "-n", space, "link", "set", "eth0", "up")
            run("ip", "-n", space, "link", "set", "lo", "up")
            run("ip", "-n", space, "route", "add", "default", "via", self.control)

    def inside(self, name: str, *words: str, own_sys: bool = False) -> list[str]:
        """A command line that runs there: own network, host name and /etc/hosts; the same files otherwise.

        `own_sys`: a /sys that shows this host's interfaces, and no cgroups."""
        script = (
            "mount -t sysfs none /sys && " if own_sys else ""
        ) + 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'
        enter = ["nsenter", f"--net=/run/netns/{self.namespace(name)}", "unshare", "--uts", "--mount", "sh", "-c", script, "host"]
        return [*enter, str(self.hosts_file), name, *words]

    def close(self) -> None:
        for name in self.names:
            run("ip", "netns", "del", self.namespace(name), check=False)
        run("ip", "link", "del", self.bridge, check=False)
