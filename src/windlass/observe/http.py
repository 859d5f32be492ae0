"""A small HTTP server for numbers: on localhost, or with a key. Standard library only, a thread a connection."""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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
            self._server = ThreadingHTTPServer((host, port), _handler(pages, key))
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


def _handler(pages: Mapping[str, Callable[[], str]], key: str) -> type[BaseHTTPRequestHandler]:
    expected = f"Bearer {key}".encode()

    class Handler(BaseHTTPRequestHandler):
        timeout = TIMEOUT_SECONDS

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/health":
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
