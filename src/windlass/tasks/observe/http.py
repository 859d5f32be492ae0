"""A small HTTP server for numbers: on localhost, or with a key. Standard library only, a thread a connection."""

from __future__ import annotations

import hmac
import ipaddress
import os
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from windlass.core.metrics.exposition import CONTENT_TYPE
from windlass.errors import BadInput

LOCAL = frozenset({"127.0.0.1", "::1", "localhost"})
TIMEOUT_SECONDS = 10.0


class TextServer:
    """`pages`: a path -> its text, made anew for every request. Everything but /health needs the key, if there is one."""

    def __init__(self, host: str, port: int, pages: Mapping[str, Callable[[], str]], key: str = "") -> None:
        """`port` 0: any free one; `self.port` is the actual one."""
        if host not in LOCAL and not key:
            raise BadInput(f"--host {host} can be reached from other machines: give --key FILE, or listen on 127.0.0.1")
        try:
            self._server = ThreadingHTTPServer((host, port), _handler(pages, key, host))
        except (OSError, OverflowError) as error:
            raise BadInput(f"cannot listen on {host}:{port}: {error}; choose another --port") from None
        self._server.daemon_threads = True
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.5}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def is_own_host(header: str, bound_to: str, has_key: bool, machine: str = "") -> bool:
    """A page of another site can point its own name at this server (DNS rebinding), but neither an address nor a name of this machine.

    `machine`: its name. With a key, under which the page could not ask, the name may have any domain behind it."""
    try:
        name = (urlsplit(f"//{header}").hostname or "").rstrip(".")
    except ValueError:
        return False
    own = (machine or os.uname().nodename).lower()
    short = own.partition(".")[0]
    return (
        name in LOCAL | {own, short, bound_to.lower()} or _is_address(name) or (has_key and name.partition(".")[0] == short != "")
    )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _handler(pages: Mapping[str, Callable[[], str]], key: str, bound_to: str) -> type[BaseHTTPRequestHandler]:
    expected = f"Bearer {key}".encode()

    class Handler(BaseHTTPRequestHandler):
        timeout = TIMEOUT_SECONDS

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            hosts = self.headers.get_all("Host") or []
            if len(hosts) != 1 and self.request_version != "HTTP/1.0":
                self._send(400, "a request has one Host header\n")
            elif hosts and not all(is_own_host(one, bound_to, bool(key)) for one in hosts):
                self._send(403, "this server has another name; use its address, its machine's name or localhost\n")
            elif path == "/health":
                self._send(200, "ok\n")
            elif key and not hmac.compare_digest(self.headers.get("Authorization", "").encode(), expected):
                self._send(401, "a key is needed: Authorization: Bearer KEY\n")
            elif path not in pages:
                self._send(404, f"not found; there is {', '.join(pages)}\n")
            else:
                self._send(200, pages[path]())

        def _send(self, code: int, text: str) -> None:
            body = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", CONTENT_TYPE if code == 200 else "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Not for every scrape."""

    return Handler
