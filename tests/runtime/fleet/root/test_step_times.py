"""Where the time of a step goes: from counts to computing, waiting and the wire."""

from __future__ import annotations

import pytest

from windlass.core.layout import Layout
from windlass.core.ranks.address import parse_workers, worker_address
from windlass.errors import BadInput
from windlass.runtime.engine.ranks.messages import RankHeartbeat
from windlass.runtime.fleet.root.step_times import rank_times
from windlass.runtime.parallel.group import Count

pytestmark = pytest.mark.pure


def beat(num_steps: int, seconds: float, **counts: Count) -> RankHeartbeat:
    return RankHeartbeat(num_steps, num_steps, seconds, {name.replace("_", " ", 1): count for name, count in counts.items()})


def test_who_comes_last_does_not_wait() -> None:
    """Ten steps of 10 ms. Rank 1 computes for 8 of them, rank 0 for 3; a sum takes 1."""
    before = {0: beat(5, 0.0, tp_all_reduce=Count(5, 100, 100, 0.5)), 1: beat(5, 0.7, tp_all_reduce=Count(5, 100, 100, 0.1))}
    after = {
        0: beat(15, 0.0, tp_all_reduce=Count(15, 300, 320, 0.5 + 0.06), steps=Count(10, 70, 0, 0.01)),
        1: beat(15, 0.7 + 0.09, tp_all_reduce=Count(15, 320, 300, 0.1 + 0.01)),
    }
    first, second = rank_times(before, after, Layout(tp=2), ("root", "a:1"), seconds=0.1, steps=10)
    assert (first.node, second.node) == ("root", "a:1")
    assert first.compute_seconds == pytest.approx(0.003)
    assert first.wire_seconds == pytest.approx(0.001 + 0.001)
    assert first.waiting_seconds == pytest.approx(0.005)
    assert second.compute_seconds == pytest.approx(0.008)
    assert second.wire_seconds == pytest.approx(0.001)
    assert second.waiting_seconds == pytest.approx(0.001), "until it is told of the next step"
    assert (first.sent_bytes, first.received_bytes) == (27, 22)
    for one in (first, second):
        assert one.compute_seconds + one.waiting_seconds + one.wire_seconds == pytest.approx(0.01)


def test_groups_are_told_apart() -> None:
    """Two stages of two: sums within a stage, rows along a tp index."""
    seconds = {0: (0.04, 0.01), 1: (0.05, 0.02), 2: (0.01, 0.03), 3: (0.02, 0.08)}
    after = {
        rank: beat(1, 0.1, tp_all_reduce=Count(1, 0, 0, tp), pp_receive_previous=Count(1, 0, 0, pp))
        for rank, (tp, pp) in seconds.items()
    }
    found = rank_times({}, after, Layout(tp=2, pp=2), ("a",) * 4, seconds=0.1, steps=1)
    assert [one.wire_seconds for one in found] == pytest.approx([0.04 + 0.01, 0.04 + 0.02, 0.01 + 0.01, 0.01 + 0.02])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:9998", ("a", 9998)),
        ("10.0.0.7", ("10.0.0.7", 9998)),
        ("[fd00::7]:17", ("fd00::7", 17)),
        ("[fd00::7]", ("fd00::7", 9998)),
    ],
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert worker_address(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a:b", "takes HOST:PORT"),
        ("a:0", "no port"),
        (":9", "takes HOST:PORT"),
        ("a:²", "takes HOST:PORT"),
        ("fd00::7", "takes HOST:PORT"),
        (",", "no machine"),
        ("a,a:9998", "twice"),
    ],
)
def test_what_is_none(text: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        parse_workers(text)
