"""What a client may do after its answer is complete."""

from __future__ import annotations

from typing import Any

import pytest
from fake import FakeClient
from raw_http import raw_request
from serving import running

from waiting import HUNG_SECONDS
from windlass.serve.http.protocol import BoundedHttpProtocol

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
    protocol.headers, protocol._in_head = [], False
    protocol.on_header(b"a", b"b")
    assert protocol.headers == []
    protocol._in_head = True
    protocol.on_header(b"a", b"b")
    assert protocol.headers == [(b"a", b"b")]
