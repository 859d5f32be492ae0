"""Targets from words, whose turn it is, and servers compared."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.errors import BadInput
from windlass.tasks.bench.served.bench import USUAL_WAITING, ServedSetup, TargetSpec, parse_target, served_words, turns
from windlass.tasks.bench.served.load import Load
from windlass.tasks.bench.served.record import LoadRun, RequestRecord
from windlass.tasks.bench.served.report import METRICS, ServedReport, TargetReport, compare, encode_report, read_report
from windlass.tasks.bench.served.summary import Limits, LoadResult, summarize
from windlass.tasks.serve.settings import ServerSettings

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://a:1/v1", TargetSpec(name="http://a:1/v1", url="http://a:1/v1")),
        ("tiny-glm", TargetSpec(name="tiny-glm", serve=("tiny-glm", "--tp", "2"), options=("--tp", "2"))),
        (
            "tiny-glm --max-running 4",
            TargetSpec(
                name="tiny-glm --max-running 4", serve=("tiny-glm", "--tp", "2", "--max-running", "4"), options=("--tp", "2")
            ),
        ),
    ],
)
def test_targets(text: str, expected: TargetSpec) -> None:
    assert parse_target(text, ("--tp", "2")) == expected


@pytest.mark.parametrize(
    ("words", "users", "expected"),
    [
        (("tiny-glm",), 64, ("tiny-glm", "--no-history")),
        (("tiny-glm",), 256, ("tiny-glm", "--max-waiting", "256", "--no-history")),
        (("tiny-glm", "--max-waiting=3"), 256, ("tiny-glm", "--max-waiting=3", "--no-history")),
        (("tiny-glm", "--max-waiting", "3", "--history"), 256, ("tiny-glm", "--max-waiting", "3", "--history")),
    ],
)
def test_our_own_server_has_room_for_all_users(words: tuple[str, ...], users: int, expected: tuple[str, ...]) -> None:
    loads = [Load(prompt_tokens=8, new_tokens=8, at_once=count) for count in (1, users)]
    assert served_words(TargetSpec(name="tiny-glm", serve=words), loads) == expected


def test_the_usual_queue_is_the_servers() -> None:
    assert ServerSettings().max_waiting == USUAL_WAITING


def test_a_path_with_spaces_is_one_word(tmp_path: Path) -> None:
    folder = tmp_path / "my model"
    folder.mkdir()
    assert parse_target(str(folder)).serve == (str(folder),)


@pytest.mark.parametrize("text", ["", " ", "--tp 2", "a 'b"])
def test_what_is_no_target(text: str) -> None:
    with pytest.raises(BadInput):
        parse_target(text)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_turns(targets: int, loads: int, rounds: int, is_exclusive: bool) -> None:
    found = turns(targets, loads, rounds, is_exclusive)
    assert len(set(found)) == len(found) == targets * loads * rounds, "every server has every load in every round, once"
    assert [turn.round for turn in found] == sorted(turn.round for turn in found)
    changes = sum(one.target != other.target for one, other in pairwise(found))
    if is_exclusive:
        assert changes == rounds * (targets - 1), "no server is started more often than needed"
    elif targets > 1:
        assert all(len({turn.target for turn in found[at : at + targets]}) == targets for at in range(0, len(found), targets))


def test_only_servers_of_our_own_exclude_each_other() -> None:
    ours, theirs = parse_target("tiny-glm"), parse_target("http://a")
    for targets, expected in (((ours,), False), ((ours, theirs, theirs), False), ((ours, ours), True)):
        assert ServedSetup(targets=targets, loads=()).is_exclusive is expected


# --- compared


def result(at_once: int, gap: float, first: float = 1.0) -> LoadResult:
    load = Load(at_once=at_once, prompt_tokens=8, new_tokens=3, requests=1)
    times = tuple(first + gap * number for number in range(3))
    records = (RequestRecord(sent=0, ended=times[-1], times=times, completion_tokens=3),)
    return summarize([LoadRun(load=load, began=0, ended=times[-1], records=records)], Limits())


def test_ratios_are_above_one_where_it_is_better() -> None:
    one = TargetReport(name="a", model="m", results=(result(1, 1.0), result(8, 1.0)))
    other = TargetReport(name="b", model="m", results=(result(8, 0.5, first=2.0), result(64, 1.0)))
    first, second = compare([one, other])
    assert [row.load.at_once for row in (first, second)] == [8, 8], "loads that only one has are not compared"
    names = [metric.name for metric in METRICS]
    assert set(first.ratios) == {None} and (first.target, second.target) == ("a", "b")
    assert second.ratios[names.index("between p50")] == 2 and second.ratios[names.index("first token p50")] == 0.5
    assert second.ratios[names.index("output")] == 1 and second.ratios[names.index("goodput")] is None


def test_the_same_server_twice_is_told_apart() -> None:
    one = TargetReport(name="a", model="m", results=(result(1, 1.0),))
    assert [row.target for row in compare([one, one, one])] == ["a (1)", "a (2)", "a (3)"]
    assert compare([one]) == ()


def test_reports_are_read_back() -> None:
    report = ServedReport(
        targets=(TargetReport(name="a", model="m", results=(result(1, 1.0),)),), limits=Limits(first_token_seconds=1)
    )
    text = encode_report(report)
    assert read_report(text, "x.json") == report
    for spoiled in (b"{}", b"[", text.replace(b'"version": 1', b'"version": 2'), msgspec.json.encode({"runs": []})):
        with pytest.raises(BadInput, match=r"x\.json"):
            read_report(spoiled, "x.json")
