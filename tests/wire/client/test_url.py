"""A proxy in the environment is for other hosts."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from waiting import HUNG_SECONDS
from windlass.wire.client.url import open_url

pytestmark = pytest.mark.pure


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.path.encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(autouse=True)
def proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that nobody listens at."""
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setattr(urllib.request, "_opener", None)  # made once, of the first environment it sees


@pytest.fixture
def port() -> Generator[int]:
    server = HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_this_machine_is_asked_itself(port: int, host: str) -> None:
    with open_url(urllib.request.Request(f"http://{host}:{port}/metrics"), HUNG_SECONDS) as answer:
        assert answer.read() == b"/metrics"


def test_others_are_asked_through_it() -> None:
    with pytest.raises(urllib.error.URLError, match="refused"):
        open_url(urllib.request.Request("http://gpu-box.example/metrics"), HUNG_SECONDS)
