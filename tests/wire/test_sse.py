"""Events come out of the parser as they went in, however the bytes are cut and whatever ends the lines."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.wire import sse
from windlass.wire.sse import BrokenEventStream, EventParser, event

pytestmark = pytest.mark.pure


def parsed(stream: bytes, cuts: list[int]) -> list[bytes]:
    parser, found = EventParser(), list[bytes]()
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    for begin, end in itertools.pairwise(edges):
        found += parser.feed(stream[begin:end])
    return found


payloads = st.lists(st.binary(min_size=1, max_size=30).filter(lambda data: not {10, 13} & set(data)), max_size=6)
cuts = st.lists(st.integers(0, 10**6), max_size=12)


@given(payloads, cuts)
def test_there_and_back_in_any_pieces(data: list[bytes], cuts: list[int]) -> None:
    assert parsed(b"".join(map(event, data)), cuts) == data


@given(payloads, cuts, st.sampled_from([b"\n", b"\r\n", b"\r"]), st.booleans())
def test_every_line_ending_comment_and_field(data: list[bytes], cuts: list[int], end: bytes, bom: bool) -> None:
    lines = [b": hello", b"event: x", b"id: 1", b"retry"]
    noisy = [end.join([*lines, b"data: " + one, b"", b""]) for one in data]
    stream = (b"\xef\xbb\xbf" if bom else b"") + b"".join(noisy) + b": the end" + end
    assert parsed(stream, cuts) == data


def test_forms() -> None:
    assert EventParser().feed(b"data:a\n\ndata:  b\n\n") == [b"a", b" b"]  # one space belongs to the form
    assert EventParser().feed(b"data: a\ndata: b\n\n") == [b"a\nb"]
    assert EventParser().feed(b"data\n\n\n\n") == [b""]
    assert EventParser().feed(b"data: unfinished\n") == []
    assert EventParser().feed(sse.DONE_EVENT) == [sse.DONE]
    assert EventParser().feed(b":\n\n") == []


def test_a_return_at_the_end_of_a_piece_may_be_half_an_ending() -> None:
    parser = EventParser()
    assert parser.feed(b"data: a\r") == []
    assert parser.feed(b"\n\r\n") == [b"a"]


@pytest.mark.parametrize("piece", [b"x" * 600, b"data: " + b"x" * 594 + b"\n"])
def test_an_event_without_end_is_refused(piece: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 1000)
    parser = EventParser()
    parser.feed(piece)
    with pytest.raises(BrokenEventStream):
        parser.feed(piece)
