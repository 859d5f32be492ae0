"""Several hosts on one box: a network namespace each, joined by a bridge in a namespace of its own, their links shaped.

A host is a place to start processes in. Its link can be cut without a word, as a pulled cable does, slowed, and its bytes counted; all its
processes can be killed at once. Names have the number of the test's process in them, and whoever makes hosts first removes those of processes
that are no more: a test that is killed leaves nothing for long. Needs Linux and root. Knows nothing of Windlass.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

from subprocesses import is_running

PREFIX = "wlhost"
NAMES = re.compile(rf"{PREFIX}-(\d+)-\d+-\w+")
NETWORK = "10.213.7"
GIGABIT = "1gbit"
SECONDS_TO_END = 60.0
NOBODY = "02:00:00:00:00:99"
HIDE = 'mount -t tmpfs none "$1" && shift && exec "$@"'
CLONE_NEWNET = 0x40000000
"""linux/sched.h"""


class Counted(NamedTuple):
    """Of a host's interface, since it was made: whole frames, with their headers."""

    sent_bytes: int
    received_bytes: int
    sent_packets: int

    def since(self, earlier: Counted) -> Counted:
        return Counted(*(now - then for now, then in zip(self, earlier, strict=True)))


class Held(NamedTuple):
    """Of one end of a link."""

    bits_per_second: int
    waited: int
    """Packets that came too soon, since it was shaped."""


_TC = ("tc", "-json", "-statistics", "qdisc", "show", "dev")


def _held(found: dict[str, Any]) -> tuple[int, int]:
    return 8 * found["options"]["rate"], found["overlimits"]


@cache
def lacking() -> str:
    """Why there can be no hosts here; empty where there can. Root in a container may lack a right, and a kernel a module: one is made."""
    missing = [tool for tool in ("ip", "tc", "nsenter", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"hosts are network namespaces, which need {', '.join(missing)} (iproute2, util-linux)"
    if os.geteuid() != 0:
        return "hosts are network namespaces, which need root"
    try:
        with Hosts(1):
            _call("unshare", "--mount", "--", "sh", "-c", HIDE, "sh", "/mnt", "true")
    except RuntimeError as error:
        return f"hosts are network namespaces, and none can be made here: {error}"
    return ""


class Hosts:
    """`with Hosts(3) as hosts`: numbered from 1, at 10.213.7.1 and so on, each with an interface `v`."""

    _made = 0

    def __init__(self, count: int, rate: str = GIGABIT, cut_packets: bool = False) -> None:
        """`cut_packets`: to Ethernet's size where they are sent, as a card does; between namespaces the system need not, and a packet that
        is many costs one header in the counters."""
        Hosts._made += 1
        self._names = [f"{PREFIX}-{os.getpid()}-{Hosts._made}-{number}" for number in range(1, count + 1)]
        self._bridge = f"{PREFIX}-{os.getpid()}-{Hosts._made}-bridge"
        self.rate, self._cut_packets = rate, cut_packets
        self._processes: list[subprocess.Popen[Any]] = []
        self._halting: dict[int, tuple[threading.Event, threading.Thread]] = {}

    def __enter__(self) -> Self:
        remove_stale()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def numbers(self) -> range:
        return range(1, len(self._names) + 1)

    def _build(self) -> None:
        _call("ip", "netns", "add", self._bridge)
        self._in_bridge("ip", "link", "add", "bridge", "type", "bridge")
        self._in_bridge("ip", "link", "set", "bridge", "up")
        for number in self.numbers:
            self._build_host(number)

    def _build_host(self, number: int) -> None:
        name, port = self._names[number - 1], f"p{number}"
        _call("ip", "netns", "add", name)
        _call("ip", "link", "add", "v", "netns", name, "type", "veth", "peer", "name", port, "netns", self._bridge)
        self._in_bridge("ip", "link", "set", port, "master", "bridge", "up")
        self._in(number, "ip", "address", "add", f"{self.address(number)}/24", "dev", "v")
        if self._cut_packets:
            self._in(number, "ip", "link", "set", "v", "gso_max_segs", "1")
        self._in(number, "ip", "link", "set", "v", "up")
        self._in(number, "ip", "link", "set", "lo", "up")
        self.shape(number, self.rate)

    def address(self, number: int) -> str:
        return f"{NETWORK}.{number}"

    # --- what happens to a link ------------------------------------------------------------------------------------------

    def shape(self, number: int, rate: str) -> None:
        """Both ways: what the host sends, and what the bridge sends to it. Packets are lost where 50 ms of them wait."""
        burst = "256kb" if rate.endswith("gbit") else "32kb"
        words = ("root", "handle", "1:", "tbf", "rate", rate, "burst", burst, "latency", "50ms")
        self._in(number, "tc", "qdisc", "replace", "dev", "v", *words)
        self._in_bridge("tc", "qdisc", "replace", "dev", f"p{number}", *words)

    def cut(self, number: int) -> None:
        """The bridge's end goes down: nobody is told, packets are just gone."""
        self._in_bridge("ip", "link", "set", f"p{number}", "down")

    def restore(self, number: int) -> None:
        self._in_bridge("ip", "link", "set", f"p{number}", "up")

    def part(self, first: int, second: int) -> None:
        """Two hosts that do not reach each other, and everybody else: each sends to where nobody listens."""
        for number, other in ((first, second), (second, first)):
            self._in(number, "ip", "neigh", "replace", self.address(other), "lladdr", NOBODY, "dev", "v", "nud", "permanent")

    def rejoin(self, first: int, second: int) -> None:
        for number, other in ((first, second), (second, first)):
            self._in(number, "ip", "neigh", "del", self.address(other), "dev", "v")

    def held_back(self, number: int) -> tuple[Held, Held]:
        """What the host's end and the bridge's end of its link are shaped to, and how often that made a packet wait."""
        listed = (self._in(number, *_TC, "v"), self._in_bridge(*_TC, f"p{number}"))
        found = [next(one for one in json.loads(text) if one["kind"] == "tbf") for text in listed]
        return Held(*_held(found[0])), Held(*_held(found[1]))

    def counted(self, number: int) -> Counted:
        """From the bridge's end, which sees what the host sees and is there when the host is not."""
        text = self._in_bridge("cat", "/proc/net/dev")
        line = next(line for line in text.splitlines() if line.strip().startswith(f"p{number}:"))
        fields = [int(field) for field in line.split(":")[1].split()]
        return Counted(sent_bytes=fields[0], received_bytes=fields[8], sent_packets=fields[1])

    # --- what happens in a host --------------------------------------------------------------------------------------------

    def start(self, number: int, argv: Sequence[str | Path], hidden: Path | None = None, **options: Any) -> subprocess.Popen[Any]:
        """As Popen, whose process is the program itself. It leads a group of its own, so that Ctrl-C of the tests is not its.

        `hidden`: a folder that the host does not have; it sees an empty one.
        """
        options = {"start_new_session": True, **options}
        hiding = [] if hidden is None else ["unshare", "--mount", "--", "sh", "-c", HIDE, "sh", str(hidden)]
        process = subprocess.Popen([*self._enter(number), *hiding, *map(str, argv)], **options)
        self._processes.append(process)
        return process

    def run(self, number: int, argv: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
        """To its end; what it wrote is in the result."""
        options = {"capture_output": True, "text": True, "timeout": 120, **options}
        return subprocess.run([*self._enter(number), *map(str, argv)], **options)

    def connect(self, number: int, address: str, port: int, timeout: float | None = None) -> socket.socket:
        """A connection of this process that begins in the host: a socket belongs to the network its thread was in when it was made."""
        found: list[socket.socket | OSError] = []

        def make() -> None:
            try:
                with Path(f"/run/netns/{self._names[number - 1]}").open() as namespace:
                    if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "setns")
                found.append(socket.create_connection((address, port), timeout))
            except OSError as error:
                found.append(error)

        thread = threading.Thread(target=make)  # and no other: a thread that has gone there does not come back
        thread.start()
        thread.join()
        if isinstance(found[0], OSError):
            raise found[0]
        return found[0]

    def pids(self, number: int) -> list[int]:
        """Of every process in the host, whoever started it."""
        return _pids(self._names[number - 1])

    def commands(self, number: int) -> dict[int, str]:
        """Of each process its words; what has just ended is left out."""
        found: dict[int, str] = {}
        for pid in self.pids(number):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if words:  # a process that has ended and was not waited for has none
                    found[pid] = words
        return found

    def kill(self, number: int) -> list[int]:
        """As when the power goes: every process at once, and nothing is said to anybody (a killed process's sockets would say goodbye)."""
        self.cut(number)
        pids = self.pids(number)
        for pid in pids:
            _signal(pid, signal.SIGKILL)
        self._reap()
        return pids

    def revive(self, number: int) -> None:
        """Powered on again: the link is there, and no process."""
        self.restore(number)

    def halt(self, number: int, on_seconds: float, off_seconds: float) -> None:
        """Slows a host's processes: they run and stand still by turns until `unhalt`."""
        stop = threading.Event()
        thread = threading.Thread(target=self._halt, args=(number, stop, on_seconds, off_seconds), daemon=True)
        self._halting[number] = stop, thread
        thread.start()

    def unhalt(self, number: int) -> None:
        if (halting := self._halting.pop(number, None)) is not None:
            stop, thread = halting
            stop.set()
            thread.join()
            for pid in self.pids(number):
                _signal(pid, signal.SIGCONT)

    def _halt(self, number: int, stop: threading.Event, on_seconds: float, off_seconds: float) -> None:
        while not stop.wait(on_seconds):
            stopped = self.pids(number)
            for pid in stopped:
                _signal(pid, signal.SIGSTOP)
            stop.wait(off_seconds)
            for pid in stopped:
                _signal(pid, signal.SIGCONT)

    # --- the end -------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Whatever still runs is killed. May be called twice."""
        for number in list(self._halting):
            self.unhalt(number)
        for name in (*self._names, self._bridge):
            _remove(name)
        self._forget()

    def _reap(self) -> None:
        """Of those that have ended, the status is asked for."""
        for process in self._processes:
            if not is_running(process.pid):
                process.wait()

    def _forget(self) -> None:
        self._reap()
        for process in self._processes:
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        self._processes.clear()

    def _enter(self, number: int) -> list[str]:
        """Not `ip netns exec`, which hides /sys/fs/cgroup behind a new /sys."""
        return ["nsenter", f"--net=/run/netns/{self._names[number - 1]}", "--"]

    def _in(self, number: int, *words: str) -> str:
        return _call(*self._enter(number), *words)

    def _in_bridge(self, *words: str) -> str:
        return _call("nsenter", f"--net=/run/netns/{self._bridge}", "--", *words)


def remove_stale() -> None:
    """Hosts whose makers are gone, and what still runs in them."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for line in listed.splitlines():
        found = NAMES.fullmatch(line.split()[0]) if line.split() else None
        if found is not None and not Path(f"/proc/{found[1]}").exists():
            _remove(found[0])


def _remove(name: str) -> None:
    """A namespace lives on while a process is in it, so those go first, and those they start meanwhile."""
    if not Path(f"/run/netns/{name}").exists():
        return
    end = time.monotonic() + SECONDS_TO_END
    while (pids := _pids(name)) and time.monotonic() < end:
        for pid in pids:
            _signal(pid, signal.SIGKILL)
        time.sleep(0.02)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _pids(name: str) -> list[int]:
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
    return [int(word) for word in listed.split() if is_running(int(word))]


def _signal(pid: int, what: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, what)


def _call(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
