"""urllib without a proxy for this machine's own addresses, which no proxy can reach."""

from __future__ import annotations

import urllib.request
from http.client import HTTPResponse
from typing import cast
from urllib.parse import urlsplit

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def open_url(request: urllib.request.Request, timeout_seconds: float) -> HTTPResponse:
    """As urllib.request.urlopen, and raises what it raises. Other hosts are asked as http_proxy and no_proxy say."""
    if urlsplit(request.full_url).hostname not in LOOPBACK:
        return cast(HTTPResponse, urllib.request.urlopen(request, timeout=timeout_seconds))
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return cast(HTTPResponse, direct.open(request, timeout=timeout_seconds))
