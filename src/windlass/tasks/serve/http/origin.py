"""Checks of the Host and Origin headers, and CORS.

Another site's page can make a browser send requests to servers on localhost. Two checks prevent it: the Host must be one of the
server's own names (DNS rebinding points a foreign name at 127.0.0.1), and the Origin, if any, must be the server's own or allowed.
"""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def is_local(host: str) -> bool:
    """Whether `host` is a loopback address."""
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
"""How long a browser may cache a preflight response."""


def host_name(header: str) -> str:
    """`[::1]:8000` -> `::1`; empty if it is not a host with an optional port."""
    found = HOST.fullmatch(header)
    return "" if found is None else (found["address"] or found["name"]).lower().rstrip(".")


def own_names(bound_to: str, allowed: tuple[str, ...] = ()) -> frozenset[str] | None:
    """The names that a server on loopback, or with allowed hosts set, accepts; None: any."""
    if not allowed and not is_local(bound_to):
        return None
    names = frozenset((bound_to.lower(), *(host.lower() for host in allowed)))
    return names | LOCAL_NAMES if is_local(bound_to) else names


def allows_host(header: str | None, names: frozenset[str] | None) -> bool:
    if names is None or header is None:  # no header: HTTP/1.0; browsers always send one
        return True
    return host_name(header) in names


def allows_origin(origin: str | None, host: str | None, cors_origins: tuple[str, ...] = ()) -> bool:
    """Programs send no Origin; the server's own page sends the server's address; other sites must be allowed."""
    if origin is None or "*" in cors_origins or origin in cors_origins:
        return True
    try:
        return host is not None and urlsplit(origin).netloc.lower() == host.lower() != ""
    except ValueError:
        return False


def cors_headers(origin: str | None, cors_origins: tuple[str, ...], requested: str | None = None) -> list[tuple[bytes, bytes]]:
    """Empty unless the origin is allowed by name or `*`. `requested`: headers the page wants to send (OpenAI's client has many)."""
    if origin is None or not ("*" in cors_origins or origin in cors_origins):
        return []
    return [
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-allow-headers", _allowed_headers(requested)),
        (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
        (b"access-control-expose-headers", b"retry-after, x-request-id, windlass-tools, windlass-unenforced, windlass-schema"),
        (b"access-control-max-age", str(CORS_SECONDS).encode()),
        (b"vary", b"origin, access-control-request-headers"),
    ]


def _allowed_headers(requested: str | None) -> bytes:
    """Any valid header names are allowed: no header changes what a page may see or do here."""
    if requested is None or len(requested) > MAX_HEADER_NAMES or not HEADER_NAMES.fullmatch(requested):
        return b"authorization, content-type"
    return requested.encode("ascii")
