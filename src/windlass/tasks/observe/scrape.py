"""Where numbers come from: a server, a run or a machine, over HTTP or in this process."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable

from windlass.core.model import Frozen
from windlass.wire.client.url import open_url

TIMEOUT_SECONDS = 5.0
MAX_BYTES = 16 * 2**20


class Unreachable(Exception):
    """In words, without the address."""


class Source(Frozen):
    job: str
    instance: str
    read: Callable[[], str]
    """Its metrics as text. Raises Unreachable."""


def http_source(job: str, address: str, key: str = "") -> Source:
    """`address`: host:port, or a URL without /metrics."""
    base = address if "://" in address else f"http://{address}"
    return Source(job=job, instance=base.partition("://")[2].rstrip("/"), read=lambda: fetch(f"{base.rstrip('/')}/metrics", key))


def fetch(url: str, key: str = "", timeout_seconds: float = TIMEOUT_SECONDS) -> str:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with open_url(request, timeout_seconds) as response:
            return response.read(MAX_BYTES).decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        error.close()
        why = "it needs a key (--key)" if error.code in (401, 403) else f"HTTP {error.code}"
        raise Unreachable(why) from None
    except (OSError, ValueError) as error:
        raise Unreachable(str(getattr(error, "reason", error)) or type(error).__name__) from None
