"""What a client may do before its request is accepted, and after its answer is complete."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake import FakeClient
from raw_http import raw_request
from serving import Running, get, running

from waiting import HUNG_SECONDS
from windlass.tasks.serve.http.protocol import BoundedHttpProtocol

pytestmark = pytest.mark.pure


def test_the_rest_of_a_body_that_nobody_reads_has_a_time_limit() -> None:
    """It stops the timer of an idle connection, and nothing else would close it."""
    head = "POST /v1/chat/completions HTTP/1.1\nHost: localhost\nContent-Length: 100"
    with running(FakeClient, api_keys=("secret",), head_seconds=0.2) as server, raw_request(server, head) as connection:
        connection.settimeout(HUNG_SECONDS)
        assert b"401" in connection.recv(65536)
        connection.sendall(b" ")
        while connection.recv(65536):
            pass


def test_trailers_are_not_kept() -> None:
    protocol: Any = object.__new__(BoundedHttpProtocol)
    protocol.headers, protocol._in_head, protocol._own_bytes = [], False, 0
    protocol.on_header(b"a", b"b")
    assert protocol.headers == []
    protocol._in_head = True
    protocol.on_header(b"a", b"b")
    assert protocol.headers == [(b"a", b"b")]


def answer(server: Running, head: str, pause: bool = False) -> tuple[int, Any]:
    """`pause`: the head arrives in pieces."""
    with raw_request(server, head[:1000] if pause else head, end="" if pause else None) as connection:
        connection.settimeout(HUNG_SECONDS)
        received = bytearray()
        try:
            for start in range(1000, len(head), 1000) if pause else ():
                connection.sendall(head[start : start + 1000].replace("\n", "\r\n").encode())
        except OSError:  # it has answered and closed
            pass
        while data := connection.recv(65536):
            received += data
    first, _, body = bytes(received).partition(b"\r\n\r\n")
    return int(first.split()[1]), json.loads(body)


@pytest.mark.parametrize("pause", [False, True])
def test_headers_of_100_kb_are_refused_in_one_piece_or_many(pause: bool) -> None:
    with running(FakeClient) as server:
        status, body = answer(server, "GET /health HTTP/1.1\nHost: localhost\nX-Long: " + "a" * 100_000 + "\nX-More: a", pause)
        assert (status, body["error"]["code"]) == (431, "headers_too_large")
        assert get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize(
    "head", ["GET /" + "a" * 100_000 + " HTTP/1.1\nHost: localhost", "GET / HTTP/1.1\nHost: localhost" + "\na: b" * 300]
)
def test_a_long_address_and_many_headers_are_refused_too(head: str) -> None:
    with running(FakeClient) as server:
        assert answer(server, head)[0] == 431


def test_long_headers_within_the_limit_and_a_large_body_are_taken() -> None:
    body = b'{"messages": [{"role": "user", "content": "' + b"a " * 100_000 + b'"}], "max_tokens": 1}'
    head = f"POST /v1/chat/completions HTTP/1.1\nHost: localhost\nX-Long: {'a' * 60_000}\nContent-Length: {len(body)}\nConnection: close"
    with running(FakeClient) as server, raw_request(server, head, body) as connection:
        assert connection.recv(65536).startswith((b"HTTP/1.1 200", b"HTTP/1.1 400"))  # too long for its context


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET /health HTTP/1.1\nAccept: */*\nConnection: close", 400),
        ("GET /health HTTP/1.1\nHost: localhost\nHost: localhost\nConnection: close", 400),
        ("GET /health HTTP/1.1\nHost: localhost\nHost: example.org\nConnection: close", 400),
        ("GET /health HTTP/1.1\nHost: example.org\nConnection: close", 403),
        ("GET /health HTTP/1.1\nHost: localhost\nConnection: close", 200),
        ("GET /health HTTP/1.0\nAccept: */*", 200),
        ("GET /health HTTP/1.0\nHost: localhost\nHost: localhost", 400),
        ("this is not HTTP", 400),
    ],
)  # fmt: skip
def test_a_request_names_one_host(head: str, status: int) -> None:
    with running(FakeClient) as server:
        found, body = answer(server, head)
        assert found == status
        assert status == 200 or body["error"]["message"]
