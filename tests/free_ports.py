"""Ports for programs that are told one, where several runs of the tests go side by side."""

from __future__ import annotations

import itertools
import os
import socket

FIRST, COUNT = 10_000, 10_000
"""Below those that systems give to whoever asks for any (Linux: from 32,768 on), and those that jobs of `windlass launch` meet at."""
_turns = itertools.count()


def free_port() -> int:
    """Of 127.0.0.1. Every process begins at another one, so that nobody else takes it before it is used."""
    while True:
        port = FIRST + (101 * os.getpid() + next(_turns)) % COUNT
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
