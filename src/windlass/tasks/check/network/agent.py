"""`windlass check-agent`: measures on one machine what it is asked for, a line of JSON in and one out. Ends with its input.

Knows nothing of verdicts. Everything that all machines do at once (listen, then connect) is ordered by the one that asks.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import msgspec

from windlass.runtime.machine.health.disk_check import DiskFacts, measure_disk
from windlass.tasks.check.machine.disk import SharedFacts
from windlass.tasks.check.machine.facts import read_machine

CONNECT_SECONDS = 3.0
PINGS = 20
BYTES, PIECE = 64 * 2**20, 2**20
BANDWIDTH_SECONDS = 3.0
MARK = ".windlass-check"


def serve(source: TextIO, out: TextIO) -> int:
    agent = Agent()
    for line in source:
        if not line.strip():
            continue
        asked = msgspec.json.decode(line.encode(), type=dict[str, Any])
        try:
            answer: Any = {"ok": agent.answer(asked.pop("do"), asked)}
        except Exception as error:  # noqa: BLE001 - the asker judges; an agent that dies says less
            answer = {"error": f"{type(error).__name__}: {error}"}
        out.write(msgspec.json.encode(answer).decode() + "\n")
        out.flush()
    agent.close()
    return 0


class Agent:
    def __init__(self) -> None:
        self._listening: list[socket.socket] = []
        self._answers: dict[str, Callable[..., Any]] = {
            "facts": read_machine,
            "clock": time.time,
            "listen": self._listen,
            "connect": connect,
            "bandwidth": bandwidth,
            "disk": _disk,
            "mark": mark,
            "look": look,
            "unmark": unmark,
            "work": work,
            "allreduce": all_reduce,
        }

    def answer(self, name: str, arguments: dict[str, Any]) -> Any:
        if name not in self._answers:
            raise ValueError(f"unknown request {name!r}")
        return self._answers[name](**arguments)

    def _listen(self, ports: list[int], address: str = "") -> dict[str, str]:
        """Port -> why it could not be used; 0 picks a free one, returned under `bound`."""
        problems: dict[str, str] = {}
        bound: list[int] = []
        for port in ports:
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((address, port))
                listener.listen(128)
            except OSError as error:
                problems[str(port)] = error.strerror or str(error)
                listener.close()
                continue
            bound.append(listener.getsockname()[1])
            self._listening.append(listener)
            threading.Thread(target=_accept, args=(listener,), daemon=True).start()
        return problems | {"bound": ",".join(map(str, bound))}

    def close(self) -> None:
        for listener in self._listening:
            listener.close()


def _accept(listener: socket.socket) -> None:
    while True:
        try:
            peer, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_talk, args=(peer,), daemon=True).start()


def _talk(peer: socket.socket) -> None:
    """`p`: echo each byte. `b`: swallow, then say how much."""
    with peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            kind = peer.recv(1)
            while kind == b"p" and (got := peer.recv(1)):
                peer.sendall(got)
            if kind == b"b":
                total = 0
                while got := peer.recv(PIECE):
                    total += len(got)
                peer.sendall(str(total).encode())
        except OSError:
            return


def connect(targets: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """For each HOST, PORT: the round trip in seconds, or why there is none."""
    return [_reach(host, port) for host, port in targets]


def _reach(host: str, port: int) -> dict[str, Any]:
    try:
        with socket.create_connection((host, port), timeout=CONNECT_SECONDS) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.sendall(b"p")
            trips: list[float] = []
            for _ in range(PINGS):
                began = time.perf_counter()
                link.sendall(b"x")
                if not link.recv(1):
                    raise ConnectionError("closed")
                trips.append(time.perf_counter() - began)
            return {"host": host, "port": port, "seconds": min(trips)}
    except OSError as error:
        return {"host": host, "port": port, "problem": "no answer (timed out)" if isinstance(error, TimeoutError) else str(error)}


def bandwidth(host: str, port: int, num_bytes: int = BYTES) -> float:
    """Bytes per second over one connection."""
    data = bytes(PIECE)
    with socket.create_connection((host, port), timeout=CONNECT_SECONDS) as link:
        link.settimeout(60)
        link.sendall(b"b")
        began, sent = time.perf_counter(), 0
        while sent < num_bytes and time.perf_counter() - began < BANDWIDTH_SECONDS:
            link.sendall(data)
            sent += len(data)
        link.shutdown(socket.SHUT_WR)
        link.recv(64)
        return sent / (time.perf_counter() - began)


def _disk(folder: str) -> DiskFacts:
    return measure_disk(Path(folder))


# --- shared storage


def mark(folder: str, name: str) -> SharedFacts:
    """Writes this machine's mark, and measures while all others write too."""
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{MARK}-{name}").write_text(name)
        speed = measure_disk(place, 32 * 2**20).write_bytes_per_second
    except OSError as error:
        return SharedFacts(host=name, folder=folder, sees=(), problem=error.strerror or str(error))
    return SharedFacts(host=name, folder=folder, sees=(), write_bytes_per_second=speed)


def look(folder: str) -> list[str]:
    return sorted(path.name.removeprefix(f"{MARK}-") for path in Path(folder).glob(f"{MARK}-*"))


def unmark(folder: str, name: str) -> None:
    (Path(folder) / f"{MARK}-{name}").unlink(missing_ok=True)


# --- the same work everywhere


def work(size: int = 1024, device: str = "cpu") -> dict[str, float]:
    return _measured_apart("windlass.runtime.parallel.work_speed", [str(size), device], {})


def all_reduce(rank: int, world: int, address: str, port: int, sizes: list[int], backend: str, interface: str = "") -> Any:
    given = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {}
    words = [str(rank), str(world), address, str(port), backend, ",".join(map(str, sizes))]
    return _measured_apart("windlass.runtime.parallel.all_reduce_speed", words, given)


def _measured_apart(module: str, words: list[str], given: dict[str, str]) -> Any:
    """In a process of its own, which imports torch: NCCL and gloo end a process when they fail."""
    import os
    import subprocess

    argv = [sys.executable, "-P", "-m", module, *words]
    done = subprocess.run(argv, capture_output=True, text=True, env=os.environ | given, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["failed"])[-1])
    return msgspec.json.decode(done.stdout.strip().splitlines()[-1].encode())
