"""Whether a request may come from where it comes from.

A page of another site can make a browser send requests to servers on localhost. Two checks stop it: the name by which the server is
addressed must be one of its own (DNS rebinding points a foreign name at 127.0.0.1), and a page that names its origin must be ours.
"""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def is_local(host: str) -> bool:
    """Whether only this machine can reach what is bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


HOST = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[0-9A-Za-z._-]+))(?::[0-9]{1,5})?")
HEADER_NAMES = re.compile(r"[0-9A-Za-z!#$%&'*+.^_`|~-]+(?:[ \t]*,[ \t]*[0-9A-Za-z!#$%&'*+.^_`|~-]+)*")
MAX_HEADER_NAMES = 4096
CORS_SECONDS = 600
"""For which a browser need not ask again whether it may ask."""


def host_name(header: str) -> str:
    """`[::1]:8000` -> `::1`; empty where it is anything else than a host and a port."""
    found = HOST.fullmatch(header)
    return "" if found is None else (found["address"] or found["name"]).lower().rstrip(".")


def allows_host(header: str | None, bound_to: str, allowed: tuple[str, ...] = ()) -> bool:
    """Bound to localhost, or told its names, a server answers only to them; otherwise to any."""
    if not allowed and not is_local(bound_to):
        return True
    if header is None:  # HTTP/1.0; browsers always send one
        return True
    name = host_name(header)
    own = {bound_to.lower(), *(word.lower() for word in allowed)}
    if is_local(bound_to):
        own |= LOCAL_NAMES
    return name in own


def allows_origin(origin: str | None, host: str | None, cors_origins: tuple[str, ...] = ()) -> bool:
    """Programs send none; our own page sends the server's address; others must have been allowed."""
    if origin is None or "*" in cors_origins or origin in cors_origins:
        return True
    try:
        return host is not None and urlsplit(origin).netloc.lower() == host.lower() != ""
    except ValueError:
        return False


def cors_headers(origin: str | None, cors_origins: tuple[str, ...], wished: str | None = None) -> list[tuple[bytes, bytes]]:
    """Nothing unless the origin was allowed by name or by a star. `wished`: headers that a page asks to send (OpenAI's client has many)."""
    if origin is None or not ("*" in cors_origins or origin in cors_origins):
        return []
    return [
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-allow-headers", _allowed_headers(wished)),
        (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
        (b"access-control-expose-headers", b"retry-after"),
        (b"access-control-max-age", str(CORS_SECONDS).encode()),
        (b"vary", b"origin, access-control-request-headers"),
    ]


def _allowed_headers(wished: str | None) -> bytes:
    """Whatever is asked for, as long as they are names of headers: none of them changes what a page may see or do here."""
    if wished is None or len(wished) > MAX_HEADER_NAMES or not HEADER_NAMES.fullmatch(wished):
        return b"authorization, content-type"
    return wished.encode("ascii")
