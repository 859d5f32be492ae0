"""Free ports: tried by listening on them for a moment."""

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
    tried = list(candidates)
    for port in tried:
        if is_free(port, address):
            return port
    raise BadInput(f"none of {len(tried)} ports from {tried[0]} on is free on this machine; end what holds them")


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
