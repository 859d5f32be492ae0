"""Mutated inputs: every reader reads or refuses them. Few in every run and the same ones; a minute of others with `make long`."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from random import Random

import pytest

from fuzz.mutate import alter, change_tree, mutate_json, mutate_safetensors
from fuzz.reader import Reader
from fuzz.readers import READERS
from fuzz.run import Campaign, Finding
from windlass.errors import BadInput, MissingExtra

INPUTS = 24
SECONDS = float(os.environ.get("WINDLASS_FUZZ_SECONDS", 60))
"""Of each reader, in the long run."""


def marked(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.cpu if READERS[name].is_heavy else pytest.mark.pure)


every_reader = pytest.mark.parametrize("name", [marked(name) for name in READERS])


def campaign(name: str, seed: int, folder: Path, given: tuple[bytes, ...] = ()) -> Campaign:
    if READERS[name].is_heavy:
        pytest.importorskip("torch").set_num_threads(1)
    try:
        return Campaign(name, seed, folder, given)
    except (MissingExtra, ModuleNotFoundError) as error:
        pytest.skip(str(error))


def shown(found: dict[str, Finding]) -> str:
    return "\n".join(map(str, found.values()))


@every_reader
def test_a_few_inputs_are_read_or_refused(name: str, tmp_path: Path) -> None:
    made = campaign(name, 0, tmp_path)
    made.run(INPUTS)
    assert not made.result.findings, shown(made.result.findings)
    assert made.result.inputs == INPUTS


@pytest.mark.long
@every_reader
def test_a_minute_of_inputs_is_read_or_refused(name: str, tmp_path: Path) -> None:
    import time

    made = campaign(name, int(time.time()), tmp_path)
    while made.result.seconds < SECONDS:
        made.run(500)
    assert not made.result.findings, shown(made.result.findings)


# --- what was found once

NESTED = b"[" * 5000
FOUND: list[tuple[str, bytes]] = [
    ("safetensors-index", b'{"weight_map": {"a": "' + b"1" * 5000 + b'"}}'),
    ("checkpoint-contents", b"\x80\x04]r\xff\xff\xff\x7f."),
    ("checkpoint-contents", b"\x80\x05\x96\x00\x00\x00\x00\x01\x00\x00\x00."),
    ("checkpoint-contents", b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff."),
    ("schema-answer", b'[{"a": 1}, {"properties": {"a": {"$ref": []}}}]'),
    ("schema-answer", b'[{"a": 1}, {"properties": []}]'),
    (
        "event-stream",
        b'data: {"choices": [{"text": "a", "logprobs": {"tokens": ["a"], "token_logprobs": [], "text_offset": []}}]}\n\n',
    ),
    ("server-lists", b"windlass_engine_steps_total 1e+\n"),
    ("task-file", b"a = " + NESTED),
    ("recipe", b"a = " + NESTED),
    ("cluster", b"a = " + NESTED),
    ("route-settings", b"a = " + NESTED),
    ("key-file", b"a = " + NESTED),
    ("plan", b'{"\x80": 1}'),
    ("reports", b'{"a": ' + NESTED),
    ("generation-config", b'{"a": ' + NESTED),
    ("tokenizer-config", b'{"a": ' + NESTED),
    ("error-body", b'{"detail": ' + NESTED),
    ("history", b"windlass history 1\nS\x02\x00\x00\x00[x"),
    ("shard-documents", struct.pack("<4Q", 0, 2**40, 12, 42)),
    ("shard-learned", struct.pack("<6Q", 2**62, 2**63, 3, 11, 12, 41)),
]


@pytest.mark.parametrize(
    ("name", "data"),
    [pytest.param(*one, marks=pytest.mark.cpu if READERS[one[0]].is_heavy else pytest.mark.pure) for one in FOUND],
    ids=[f"{name}-{number}" for number, (name, _) in enumerate(FOUND)],
)
def test_what_was_found_once_is_refused_now(name: str, data: bytes, tmp_path: Path) -> None:
    """Or read: what matters is that nothing else happens."""
    made = campaign(name, 0, tmp_path, given=(data,))
    made.run(1)
    assert not made.result.findings, shown(made.result.findings)


# --- the fuzzer itself


def refuse_zeros(data: bytes, folder: Path) -> None:
    if b"\0" in data:
        raise BadInput("a zero")


def break_on(*marks: bytes, how: object = RuntimeError) -> Reader:
    def read(data: bytes, folder: Path) -> None:
        if any(mark in data for mark in marks):
            if how == "memory":
                bytearray(2**33)
            elif how == "crash":
                os.abort()
            elif how == "hang":
                while True:
                    pass
            raise RuntimeError("broken")

    return Reader(lambda folder: [(b"abc", b"def")], read, seconds=0.2)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("how", "what"),
    [("error", "RuntimeError"), ("memory", "MemoryError"), ("crash", "SIGABRT"), ("hang", "SIGPROF: more than")],
)
def test_a_broken_reader_is_found_and_the_input_made_again(
    how: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(READERS, "broken", break_on(b"\xff", how=how))
    made = Campaign("broken", 0, tmp_path)
    made.run(60)
    assert made.result.inputs == 60
    (found,) = made.result.findings.values()
    assert what in found.what and found.count > 1
    if how == "error":
        again = Campaign("broken", found.seed, tmp_path)
        assert again.one(found.number) is not None and again.one(0) is None


@pytest.mark.pure
def test_a_sound_input_that_is_refused_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(READERS, "zeros", Reader(lambda folder: [(b"\0",)], refuse_zeros))
    made = Campaign("zeros", 0, tmp_path)
    made.run(1)
    assert ["a sound input is refused" in found for found in made.result.findings] == [True]


@pytest.mark.pure
def test_the_same_seed_makes_the_same_changes() -> None:
    header = b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    samples = [(len(header).to_bytes(8, "little"), header, b"1234")]
    made = [[mutate_safetensors(Random(number), samples) for number in range(200)] for _ in range(2)]
    assert made[0] == made[1] and len(set(made[0])) > 150


@pytest.mark.pure
def test_trees_stay_trees() -> None:
    """No tree holds itself, which could not be written."""
    for number in range(300):
        mutate_json(Random(number), [(b'{"a": [1, {"b": {"c": [[], "x", 2.5]}}], "d": {"e": {}}}',)])
        assert alter(Random(number), b"") is not None
        change_tree(Random(number), {"a": {"b": [1]}})
