"""Requests written byte by byte, for what no HTTP library would send."""

from __future__ import annotations

import socket

from serving import Running

from waiting import HUNG_SECONDS


def raw_request(server: Running, head: str, body: bytes = b"", end: str | None = None) -> socket.socket:
    """`end`: of the head; empty: more of it follows."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    made = socket.create_connection((host, int(port)), timeout=HUNG_SECONDS)
    made.sendall(head.replace("\n", "\r\n").encode() + ("\r\n\r\n" if end is None else end).encode() + body)
    return made
