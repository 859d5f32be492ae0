"""Free ports: tried by listening on them for a moment, and claimed for as long as a job needs them."""

from __future__ import annotations

import socket
import sys
import zlib
from collections.abc import Iterable

from windlass.errors import BadInput

FIRST_MEETING_PORT, NUM_MEETING_PORTS = 20000, 10000
"""Below the ports that Linux gives to outgoing connections (32768 on)."""


def meeting_ports(name: str) -> list[int]:
    """Candidates for the rendezvous of a job: jobs that start together on a node begin at different ones."""
    first = zlib.crc32(name.encode()) % NUM_MEETING_PORTS
    return [FIRST_MEETING_PORT + (first + step) % NUM_MEETING_PORTS for step in range(64)]


def free_port(candidates: Iterable[int], address: str = "") -> int:
    """The first that nothing listens on."""
    tried: list[int] = []
    for port in candidates:
        tried.append(port)
        if is_free(port, address):
            return port
    first = f" from {tried[0]} on" if tried else ""
    raise BadInput(f"none of {len(tried)} ports{first} is free on this machine; end what holds them")


class Claim:
    """A port that no other job of this machine takes while this is held: a server listens on it only seconds after it was chosen.

    It is a name of an abstract socket (unix(7)), which ends with the process, however that ends. Only Linux has these."""

    def __init__(self, candidates: Iterable[int], address: str = "") -> None:
        self._held = socket.socket(socket.AF_UNIX)
        ports = list(candidates)
        port = next((port for port in ports if self._claims(port) and is_free(port, address)), None)
        if port is None:
            raise BadInput(f"none of {len(ports)} ports is free on this machine and left by other jobs; end what holds them")
        self.port = port

    def _claims(self, port: int) -> bool:
        if sys.platform != "linux":
            return True
        self._held.close()  # of a port that was claimed but is not free
        self._held = socket.socket(socket.AF_UNIX)
        try:
            self._held.bind(f"\0windlass-port-{port}")
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._held.close()


def is_free(port: int, address: str = "") -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((address, port))
        except OSError:
            return False
    return True


if __name__ == "__main__":  # on another machine, over ssh: prints a port that is free there
    print(free_port(meeting_ports(sys.argv[1])))
