"""Strangers at the door are few, the oldest of the largest crowd go first, and a flood is paced; what the command line cannot mean is one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.cli import execute as run
from windlass.core.ranks.address import parse_address
from windlass.errors import BadInput
from windlass.runtime.fleet.worker.connection_limiter import BURST, MAX_HALF_OPEN, RATE_PER_SECOND, ConnectionLimiter, RefusalLog
from windlass.runtime.machine import gpus

pytestmark = pytest.mark.pure


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=150))
def test_there_is_room_for_so_many_and_nobody_is_forgotten(order: list[tuple[str, int]]) -> None:
    """Some leave by themselves; whoever is neither inside nor gone was sent away."""
    gate, inside = ConnectionLimiter(), dict[int, str]()
    for step, (address, leaving) in enumerate(order):
        numbers = sorted(inside)
        if leaving < len(numbers) and leaving % 2:
            gate.leave(numbers[leaving])
            del inside[numbers[leaving]]
        made: list[int] = []
        made.append(gate.enter(address, lambda made=made: inside.pop(made[0])))
        inside[made[0]] = address
        assert len(gate) == len(inside) <= min(MAX_HALF_OPEN, step + 1)


def test_the_oldest_of_the_largest_crowd_goes() -> None:
    gate, sent_away = ConnectionLimiter(), list[str]()
    for number in range(MAX_HALF_OPEN):
        address = "few" if number < 5 else "many"
        gate.enter(address, lambda who=f"{address} {number}": sent_away.append(who))
    for _ in range(3):
        gate.enter("new", lambda: sent_away.append("new"))
    assert sent_away == ["many 5", "many 6", "many 7"] and len(gate) == MAX_HALF_OPEN


def test_a_flood_is_paced_and_a_few_are_not() -> None:
    gate = ConnectionLimiter()
    now, let_in = 1e9, 0
    until = now + 10.0
    assert gate.pause_seconds(now) == 0.0
    while now < until:
        now += gate.pause_seconds(now)
        let_in += 1
    assert 0.9 * 10 * RATE_PER_SECOND < let_in < 10 * RATE_PER_SECOND + BURST + 2
    assert gate.pause_seconds(now + 60) == 0.0


def test_refusals_are_told_of_together() -> None:
    refusals = RefusalLog()
    assert refusals.summary() == ""
    refusals.add("10.0.0.9", "no secret")
    assert refusals.summary() == "refused 10.0.0.9: no secret"
    for number in range(1200):
        refusals.add(f"10.0.0.{number % 7}", "no secret")
    assert refusals.summary() == "refused 1,200 connections, the last from 10.0.0.2: no secret"
    assert refusals.summary() == ""


# --- the command line


def test_addresses() -> None:
    assert parse_address("10.0.0.7:9998", "--listen") == ("10.0.0.7", 9998)
    assert parse_address("[fd00::7]:0", "--listen") == ("fd00::7", 0)
    assert parse_address("box.local:1", "--listen") == ("box.local", 1)


@given(st.one_of(st.text(max_size=20), st.sampled_from(["", ":1", "a:", "a:-1", "a:70000", "fd00::7:9998", "a:٣", "[]:1"])))
def test_what_is_no_address_is_one_line(text: str) -> None:
    try:
        host, port = parse_address(text, "--listen")
    except BadInput as error:
        assert "HOST:PORT" in str(error) and "\n" not in str(error)
    else:
        assert host and 0 <= port <= 65535


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "--secret-file"),
        (["--secret-file", "none"], "there is no secret file none"),
        (["--secret-file", "secret", "--listen", "nonsense"], "HOST:PORT"),
        (["--secret-file", "secret", "--listen", "203.0.113.1:9998"], "no interface of this machine has it"),
        (["--secret-file", "secret", "--device", "tpu"], "--device is cpu or cuda"),
        (["--secret-file", "secret", "--device", "cuda"], "this machine has no NVIDIA GPU"),
        (["--secret-file", "secret", "--interface", "nothing0"], "unknown network interface"),
        (["--secret-file", "secret", "--model-dir", "nowhere"], "--model-dir nowhere"),
        (["--secret-file", "secret", "--cache-size", "lots"], "is not a size"),
    ],
)
def test_bad_options_are_one_line(
    options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(gpus, "this_machines_gpus", list)
    monkeypatch.chdir(tmp_path)
    Path("secret").write_text("sixteen bytes and more")
    Path("secret").chmod(0o600)
    assert run(["worker", *options]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
