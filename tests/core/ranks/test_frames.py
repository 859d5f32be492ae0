"""Frames: whatever the pieces in which bytes arrive, the bodies come out whole and in order."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.ranks.frames import BadFrame, FrameReader, frame, read_frame, write_frame

pytestmark = pytest.mark.pure


@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_bodies_come_out_whole(bodies: list[bytes], cuts: list[int]) -> None:
    data, reader, found = b"".join(map(frame, bodies)), FrameReader(), list[bytes]()
    number = 0
    while data:
        cut = cuts[number % len(cuts)]
        found += reader.push(data[:cut])
        data, number = data[cut:], number + 1
    assert found == bodies


def test_a_frame_that_is_too_long_is_refused_before_it_comes() -> None:
    with pytest.raises(BadFrame, match="a frame of 101 bytes; the longest allowed is 100"):
        FrameReader(100).push(frame(bytes(101))[:4])


def test_over_a_socket() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        write_frame(ours, b"body")
        write_frame(ours, b"")
        assert read_frame(theirs) == b"body" and read_frame(theirs) == b""
        ours.sendall(frame(b"half")[:6])
        ours.close()
        assert read_frame(theirs) is None
