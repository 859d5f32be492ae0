"""Bytes of responses -> records, whatever pieces they come in."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.tasks.bench.served.client.response import BadResponse, ResponseReader
from windlass.tasks.bench.served.record import RequestRecord

pytestmark = pytest.mark.pure

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def text(piece: str, finish: str | None = None) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "text": piece, "finish_reason": finish, "logprobs": None}]}


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def stream(*events: Any) -> bytes:
    return STREAM + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(*map(event, events))


COMPLETION = stream(text("a"), text("b"), text("é", "length"), {"choices": [], "usage": USAGE}, b"[DONE]")


def read(pieces: list[bytes], why: str = "") -> tuple[RequestRecord, ResponseReader]:
    """A second a piece."""
    reader = ResponseReader()
    for now, piece in enumerate(pieces, 1):
        reader.feed(piece, float(now))
    return reader.record(0.0, float(len(pieces)), why), reader


def test_a_completion() -> None:
    found, reader = read([COMPLETION])
    assert reader.is_complete and reader.keeps_alive
    expected = RequestRecord(
        sent=0, ended=1, times=(1.0, 1.0, 1.0), prompt_tokens=5, completion_tokens=3, cached_tokens=2, status=200, finish="length"
    )
    assert found == expected and found.is_answered


@given(st.lists(st.integers(0, len(COMPLETION)), max_size=12))
def test_pieces_do_not_matter(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(COMPLETION)]
    found, reader = read([COMPLETION[begin:end] for begin, end in pairwise(edges)])
    assert reader.is_complete and found.is_answered and len(found.times) == 3 and list(found.times) == sorted(found.times)
    assert (found.prompt_tokens, found.completion_tokens, found.finish) == (5, 3, "length")


def test_times_are_those_of_the_pieces() -> None:
    head, one, two, end = STREAM + b"Transfer-Encoding: chunked\r\n\r\n", event(text("a")), event(text("b")), event(b"[DONE]")
    pieces = [head, *(chunked(part).removesuffix(b"0\r\n\r\n") for part in (one, two)), chunked(end)]
    assert read(pieces)[0].times == (2.0, 3.0)


@pytest.mark.parametrize(
    ("events", "tokens"),
    [
        ([text(""), text("a"), text("", "stop")], 2),
        ([delta(role="assistant", content=""), delta(content="a"), delta(content="b", finish="length")], 2),
        ([delta(role="assistant"), delta(reasoning_content="a"), delta(reasoning="b"), delta(finish="stop")], 2),
        ([delta(content=None, tool_calls=[{"index": 0}]), delta("tool_calls")], 1),
        ([{"choices": [], "usage": None}, text("a")], 1),
    ],
)
def test_which_events_bring_tokens(events: list[Any], tokens: int) -> None:
    assert len(read([stream(*events, b"[DONE]")])[0].times) == tokens


@pytest.mark.parametrize(
    ("data", "error", "status"),
    [
        (
            b'HTTP/1.1 429 X\r\nContent-Length: 49\r\n\r\n{"error": {"message": "m", "code": "rate_limited"}}'[:-2] + b"}}",
            "429 rate_limited",
            429,
        ),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\nNot Found", "404 Not Found", 404),
        (b"HTTP/1.1 500 X\r\nTransfer-Encoding: chunked\r\n\r\n4\r\noops\r\n0\r\n\r\n", "500 oops", 500),
        (b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}", "not an event stream", 200),
        (stream(text("a"), {"error": {"message": "engine died", "code": "engine_unavailable"}}), "engine_unavailable", 200),
        (stream(text("a"), {"error": {"message": "engine died"}}), "engine died", 200),
        (stream(text("a")), "the stream ended early", 200),
        (stream(b"[DONE]"), "", 200),
    ],
)
def test_errors(data: bytes, error: str, status: int) -> None:
    found, _ = read([data])
    assert (found.error, found.status) == (error, status) and not found.is_answered


def test_a_stream_without_done_but_with_a_finish_is_complete() -> None:
    assert read([stream(text("a", "stop"))])[0].is_answered


def test_a_lost_connection() -> None:
    found, reader = read([COMPLETION[:-80]], why="connection lost")
    assert found.error == "connection lost" and not reader.is_complete and found.times
    assert read([b""], why="connection lost")[0].error == "connection lost" and not ResponseReader().has_data


def test_other_bodies() -> None:
    """Until the connection ends; of a stated length; with a chunk extension; after 100 Continue; HTTP/1.0."""
    body = event(text("a")) + event(b"[DONE]")
    found, reader = read([STREAM + b"\r\n" + body])
    assert found.is_answered and not reader.is_complete and not reader.keeps_alive
    found, reader = read([STREAM + b"Content-Length: %d\r\n\r\n" % len(body) + body])
    assert found.is_answered and reader.is_complete and reader.keeps_alive
    extended = b"%x;x=1\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    found, reader = read([b"HTTP/1.1 100 Continue\r\n\r\n" + STREAM + b"transfer-encoding: chunked\r\n\r\n" + extended])
    assert found.is_answered and reader.is_complete
    _, reader = read([STREAM.replace(b"1.1", b"1.0") + b"Content-Length: %d\r\n\r\n" % len(body) + body])
    assert reader.is_complete and not reader.keeps_alive
    _, reader = read([STREAM + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body])
    assert reader.is_complete and not reader.keeps_alive


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"x" * 70_000,
        STREAM + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        stream(b"not json"),
        stream(b"\xff\xfe"),
        stream({"choices": 5}),
    ],
)
def test_what_is_no_answer(data: bytes) -> None:
    with pytest.raises(BadResponse):
        read([data])
