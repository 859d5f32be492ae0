"""Whether names are resolved on this machine. No foreign name is asked for: a machine may be cut off on purpose."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

from windlass.runtime.machine.proc import ReadText, read_text

SECONDS = 3.0
"""A resolver that does not answer takes half a minute to give up."""
RESOLVERS = "/etc/resolv.conf"
PORT = 53
# An A question for the root, which every server answers somehow, if only with a refusal (RFC 1035, 4.1).
QUESTION = b"\x5a\x17\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x01"

Ask = Callable[[str, float], bool]


def name_problem(read: ReadText = read_text, ask: Ask | None = None) -> str:
    """This machine's own name, and whether the servers of resolv.conf answer. Empty: all is well, or there are none."""
    own = _within(SECONDS, lambda: _lookup_problem(os.uname().nodename))
    if own:
        return own
    servers = nameservers(read(RESOLVERS))
    return servers_problem(servers, ask or answers) if servers else ""


def nameservers(text: str) -> list[str]:
    """The three that resolvers use (resolv.conf(5))."""
    words = (line.split() for line in text.splitlines())
    return [line[1] for line in words if len(line) > 1 and line[0] == "nameserver"][:3]


def servers_problem(servers: list[str], ask: Ask) -> str:
    """One that answers is enough: the others only cost time."""
    if any(ask(server, SECONDS / len(servers)) for server in servers):
        return ""
    return f"no answer from the name server{'s' if len(servers) > 1 else ''} {', '.join(servers)} of {RESOLVERS}"


def _lookup_problem(name: str) -> str:
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        return f"this machine's own name {name} is not found ({error.strerror or error})"
    return ""


def _within(seconds: float, look: Callable[[], str]) -> str:
    """The system's resolver takes no time limit, so it is left behind in a thread."""
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(look()), daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else f"a name was not looked up within {seconds:.0f} s"


def answers(server: str, seconds: float) -> bool:
    """Whether a DNS server answers at all, with whatever."""
    address, _, zone = server.partition("%")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as connection:
            connection.settimeout(seconds)
            scope = socket.if_nametoindex(zone) if zone else 0
            connection.connect((address, PORT, 0, scope) if family == socket.AF_INET6 else (address, PORT))
            connection.send(QUESTION)
            return connection.recv(512)[:2] == QUESTION[:2]
    except OSError:
        return False
