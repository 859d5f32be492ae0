"""Agents on several machines, asked together: one thread a connection. What starts them is an argument (ssh, or a process here)."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import permutations
from typing import Any

import msgspec

from windlass.core.model import Frozen
from windlass.errors import BadInput
from windlass.runtime.machine.health.disk_check import DiskFacts
from windlass.tasks.check.machine.disk import SharedFacts
from windlass.tasks.check.machine.facts import MachineFacts
from windlass.tasks.check.network.judge import Measured, Reached

PAIRS = 512
"""Of 1,024 machines a million pairs would be tried: beyond this number each one tries its neighbours in a ring."""


class HostAgent(Frozen):
    name: str
    argv: tuple[str, ...]
    address: str
    """Where the others reach it."""


class Answer(Frozen):
    ok: Any = None
    error: str = ""


class AgentLost(Exception):
    pass


class _Link:
    def __init__(self, host: HostAgent) -> None:
        self.host = host
        try:
            self._process = subprocess.Popen(
                host.argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
            )
        except FileNotFoundError:
            raise BadInput(f"{host.argv[0]} is not installed here; it is needed to reach {host.name}") from None

    def ask(self, what: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(msgspec.json.encode({"do": what, **arguments}).decode() + "\n")
            self._process.stdin.flush()
            answer = _answer(self._process.stdout)
        except OSError:
            answer = None
        if answer is None:
            raise AgentLost(self._why())
        if answer.error:
            raise AgentLost(answer.error)
        return answer.ok

    def _why(self) -> str:
        assert self._process.stderr is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        said = str(self._process.stderr.read()) if self._process.poll() is not None else ""
        lines = said.strip().splitlines()
        return lines[-1] if lines else "the connection ended"

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _answer(stream: Iterable[str]) -> Answer | None:
    """The next line that is one: a shell may print a greeting first, even if nobody is there to read it."""
    for line in stream:
        with suppress(msgspec.DecodeError, msgspec.ValidationError):
            if line.startswith("{"):
                return msgspec.json.decode(line.encode(), type=Answer)
    return None


class Session:
    """All agents; `lost` has those that cannot be asked, with the reason."""

    def __init__(self, hosts: Sequence[HostAgent]) -> None:
        self.lost: dict[str, str] = {}
        self._pool = ThreadPoolExecutor(max(len(hosts), 1))
        self._links = {host.name: _Link(host) for host in hosts}
        self.addresses = {host.name: host.address for host in hosts}

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._pool.shutdown()

    def each(self, what: str, arguments: Mapping[str, dict[str, Any]] | None = None, **same: Any) -> dict[str, Any]:
        """Asks all at once, or those that `arguments` names; returns what they answered."""
        names = [name for name in (arguments or self._links) if name not in self.lost]
        asked = {
            name: self._pool.submit(self._links[name].ask, what, **same, **(arguments or {}).get(name, {})) for name in names
        }
        found: dict[str, Any] = {}
        for name, answer in asked.items():
            try:
                found[name] = answer.result()
            except AgentLost as error:
                self.lost[name] = str(error)
        return found

    # --- measurements

    def facts(self, full: bool) -> dict[str, MachineFacts]:
        return {name: msgspec.convert(found, MachineFacts) for name, found in self.each("facts", full=full).items()}

    def skews(self) -> dict[str, float]:
        """Seconds by which each clock is ahead of ours, by the middle of the shortest of some round trips."""
        import time

        found: dict[str, float] = {}
        for name, link in self._links.items():
            best = float("inf")
            for _ in range(3 if name not in self.lost else 0):
                with suppress(AgentLost):
                    began = time.time()
                    there = link.ask("clock")
                    took = time.time() - began
                    if took < best:
                        best, found[name] = took, there - (began + took / 2)
        return found

    def reach(self, ports: Sequence[int]) -> tuple[list[Reached], dict[str, dict[str, str]]]:
        """Every pair (of many machines, neighbours in a ring); and ports that could not even be listened on."""
        bound = self.each("listen", ports=list(ports))
        busy = {name: {port: why for port, why in one.items() if port != "bound"} for name, one in bound.items()}
        targets: dict[str, dict[str, Any]] = {}
        for source, target in self._pairs(list(bound)):
            open_ports = [int(port) for port in bound[target]["bound"].split(",") if port]
            targets.setdefault(source, {"targets": []})["targets"] += [(self.addresses[target], port) for port in open_ports]
        names = {address: name for name, address in self.addresses.items()}
        tried = [
            Reached(
                source=source,
                target=names[one["host"]],
                port=one["port"],
                seconds=one.get("seconds"),
                problem=one.get("problem", ""),
            )
            for source, answers in self.each("connect", targets).items()
            for one in answers
        ]
        return tried, {name: ports for name, ports in busy.items() if ports}

    def _pairs(self, names: list[str]) -> list[tuple[str, str]]:
        if len(names) * (len(names) - 1) <= PAIRS:
            return list(permutations(names, 2))
        return list(zip(names, [*names[1:], names[0]], strict=True))

    def bandwidths(self, port: int) -> list[Measured]:
        """One pair at a time, in a ring and against it: two measurements share no machine's link."""
        names = [name for name in self.addresses if name not in self.lost]
        found: list[Measured] = []
        for source, target in zip(names, [*names[1:], *names[:1]], strict=True):
            if source != target:
                with suppress(AgentLost):
                    rate = self._links[source].ask("bandwidth", host=self.addresses[target], port=port)
                    found.append(Measured(source=source, target=target, bytes_per_second=rate))
        return found

    def shared(self, folder: str) -> list[SharedFacts]:
        marked = self.each("mark", {name: {"name": name} for name in self.addresses}, folder=folder)
        seen = self.each("look", folder=folder)
        self.each("unmark", {name: {"name": name} for name in self.addresses}, folder=folder)
        facts = {name: msgspec.convert(one, SharedFacts) for name, one in marked.items()}
        return [msgspec.structs.replace(one, sees=tuple(seen.get(name, ()))) for name, one in facts.items()]

    def disks(self, folder: str) -> dict[str, DiskFacts]:
        return {name: msgspec.convert(one, DiskFacts) for name, one in self.each("disk", folder=folder).items()}

    def work(self, device: str) -> dict[str, dict[str, float]]:
        return self.each("work", device=device)

    def all_reduce(self, sizes: Sequence[int], port: int, interfaces: Mapping[str, str]) -> dict[int, float]:
        names = [name for name in self.addresses if name not in self.lost]
        if len(names) < 2:
            return {}
        arguments = {name: {"rank": rank, "interface": interfaces.get(name, "")} for rank, name in enumerate(names)}
        head = self.addresses[names[0]]
        answers = self.each("allreduce", arguments, world=len(names), address=head, port=port, sizes=list(sizes), backend="gloo")
        slowest: dict[int, float] = {}
        for answer in answers.values():
            for size, rate in answer.items():
                slowest[int(size)] = min(slowest.get(int(size), float("inf")), rate)
        return slowest
