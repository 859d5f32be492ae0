"""Verdicts on models, data and drills; estimates; damaged files found."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.bundled.models import find_bundled
from windlass.check.model.estimate import (
    Line,
    ShortRun,
    evaluation_times,
    example_seconds,
    line_of_runs,
    line_through,
    training_seconds,
)
from windlass.check.model.files import FileFacts, judge_files
from windlass.check.model.generation import GenerationFacts, judge_generation
from windlass.check.model.recipe import DataFacts, DrillFacts, judge_data, judge_drill
from windlass.check.report import Check
from windlass.cli.check.recipe import times_of
from windlass.open.checkpoint_files import known_digests, read_files

pytestmark = pytest.mark.pure


def only(rows: list[Check]) -> Check:
    found = [row for row in rows if row.state != "pass"]
    assert len(found) == 1, found
    return found[0]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the bundled model, to be damaged."""
    import shutil

    source = find_bundled("tiny-glm")
    assert source is not None
    return Path(shutil.copytree(source, tmp_path / "model"))


def described(facts: FileFacts) -> FileFacts:
    return msgspec.structs.replace(facts, parameters=1, has_chat_template=True)


def test_whole_files_pass(model: Path) -> None:
    facts = read_files(model, digests=True)
    assert facts.num_tensors > 0 and [row.state for row in judge_files(described(facts))] == ["pass"] * 3


def test_a_wrong_digest_is_found(model: Path) -> None:
    file = next(model.glob("*.safetensors"))
    (model / "SHA256SUMS").write_text(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n")
    assert read_files(model, digests=True).num_digests == 1
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    assert read_files(model, digests=False).problems == (), "one flipped bit shows only in the digest"
    row = only(judge_files(described(read_files(model, digests=True))))
    assert row.state == "fail" and file.name in row.measured


def test_a_file_that_is_cut_off_is_found(model: Path) -> None:
    file = next(model.glob("*.safetensors"))
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 100)
    assert only(judge_files(described(read_files(model, digests=False)))).name == "model files"


def test_a_missing_shard_is_found(model: Path) -> None:
    file = next(model.glob("*.safetensors"))
    index = {"weight_map": {"a.weight": file.name, "b.weight": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002-of-00002.safetensors is missing" in " ".join(read_files(model, digests=False).problems)


def test_digests_of_the_hubs_cache(model: Path) -> None:
    file = next(model.glob("*.safetensors"))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    file.rename(model / digest)
    file.symlink_to(model / digest)
    assert known_digests(model, [file.name]) == {file.name: digest}


def test_config_and_tokenizer() -> None:
    facts = FileFacts(path="x", num_files=1, num_bytes=1, parameters=1, has_chat_template=True)
    assert only(judge_files(msgspec.structs.replace(facts, config_problem="unknown key"))).name == "model config"
    assert only(judge_files(msgspec.structs.replace(facts, tokenizer_problem="none"))).state == "fail"
    assert only(judge_files(msgspec.structs.replace(facts, has_chat_template=False))).state == "warn"


GOOD = GenerationFacts(
    load_seconds=1.0,
    logprobs=(-0.5,) * 33,
    vocab_size=1000,
    num_prompt_tokens=128,
    prefill_seconds=0.1,
    decode_seconds=1.0,
    memory_bytes=100,
)


def test_generations() -> None:
    assert [row.state for row in judge_generation(GOOD, 100, 30.0)] == ["pass"] * 4
    assert GOOD.decode_tokens_per_second == 32
    replace = msgspec.structs.replace
    assert only(judge_generation(replace(GOOD, logprobs=(math.nan, -1.0)))).measured.startswith("NaN")
    assert only(judge_generation(replace(GOOD, logprobs=(-6.9,) * 33))).state == "fail", "noise"
    assert only(judge_generation(replace(GOOD, round_trips=False))).name == "round trip"
    assert only(judge_generation(GOOD, 50)).name == "memory"
    assert only(judge_generation(GOOD, 0, 100.0)).name == "speed"
    assert [row.state for row in judge_generation(replace(GOOD, logprobs=(-6.9,) * 33, is_random=True))] == ["pass"] * 3


def test_data_and_drills() -> None:
    assert judge_data(DataFacts(num_tokens=100, num_shards=1), 100)[0].state == "pass"
    assert judge_data(DataFacts(num_tokens=10, num_shards=1), 100)[0].state == "warn"
    assert "damaged" in only(judge_data(DataFacts(problems=("the shard x is damaged",)))).measured
    losses = {1: 2.0, 2: 1.5, 3: 1.2}
    assert judge_drill(DrillFacts(whole=losses, resumed=losses))[0].state == "pass"
    assert "[3]" in only(judge_drill(DrillFacts(whole=losses, resumed={1: 2.0, 2: 1.5}))).measured
    assert "step 3" in only(judge_drill(DrillFacts(whole=losses, resumed=losses | {3: 1.3}))).measured
    assert "out of memory" in only(judge_drill(DrillFacts(problem="out of memory"))).measured


@given(st.floats(0, 1e4), st.floats(0, 100), st.integers(1, 50), st.integers(1, 500))
def test_a_line_through_two_runs(fixed: float, each: float, small: int, more: int) -> None:
    line, large = Line(fixed=fixed, each=each), small + more
    found = line_through((small, line.at(small)), (large, line.at(large)))
    assert found.at(1000) == pytest.approx(line.at(1000), rel=1e-6, abs=1e-3)


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0, 10), st.floats(0, 2))
def test_the_time_of_a_start_says_nothing_of_an_example(first: float, second: float, wait: float, each: float) -> None:
    runs = [
        ShortRun(examples=number, seconds=start + wait + each * number, asking_seconds=wait + each * number)
        for number, start in ((4, first), (16, second))
    ]
    line = line_of_runs(*runs)
    assert line.each == pytest.approx(each, abs=1e-6) and line.at(50) == pytest.approx(
        (first + second) / 2 + wait + each * 50, abs=1e-3
    )


def test_estimates() -> None:
    times = evaluation_times(Line(fixed=10.0, each=2.0), [7], usd_per_hour=36.0)
    assert times["50"] == {"seconds": 110.0, "usd": pytest.approx(1.1)} and set(times) == {"50", "164", "7"}
    assert example_seconds(512.0, 256.0) == 2.0


def test_times_of_a_log() -> None:
    """Steps of a second each, a validation of 0.5 s behind step 4 and a checkpoint of 2 s behind step 6."""
    now, lines = 100.0, []
    for step in range(1, 13):
        now += 1.0
        lines.append({"step": step, "loss": 1.0, "seconds": 1.0, "time": now})
        now += {4: 0.5, 6: 2.0, 8: 0.5}.get(step, 0.0)
    found = times_of(lines, wall_seconds=20.0)
    assert found.validation_seconds == pytest.approx(0.5) and found.checkpoint_seconds == pytest.approx(2.0)
    assert found.start_seconds == pytest.approx(5.0)
    assert training_seconds(found, steps=100, checkpoints=2, validations=4) == pytest.approx(5 + 100 + 4 + 2)
