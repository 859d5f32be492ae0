"""Verdicts on models, data and drills; estimates; damaged files found."""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.cli.check.recipe import drill_settings, longer_steps, schedule_of, times_of
from windlass.cli.check.rehearsal import second_number
from windlass.cli.check.table import estimate_lines
from windlass.cli.plan.training import plan_recipe
from windlass.core.recipe.recipe import load_recipe
from windlass.model.bundled.models import find_bundled
from windlass.open.checkpoint_files import known_digests, read_files
from windlass.runtime.machine.health.other_programs import OtherPrograms, busy_seconds
from windlass.tasks.check.model.estimate import (
    STEADY,
    Answer,
    Rehearsal,
    Schedule,
    TrainingTimes,
    around,
    drift,
    evaluation_seconds,
    num_at_once,
    of_others,
    one_after_another,
    training_seconds,
)
from windlass.tasks.check.model.files import FileFacts, judge_files
from windlass.tasks.check.model.generation import GenerationFacts, judge_generation
from windlass.tasks.check.model.recipe import DataFacts, DrillFacts, judge_data, judge_drill
from windlass.tasks.check.report import Check

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


def evaluation(works: Sequence[float], at_once: int, start: float = 3.0, slow: float = 2.0) -> Rehearsal:
    """As `eval` does it: whoever is free asks the next question."""
    free, answers = [0.0] * at_once, list[Answer]()
    for work in works:
        began = heapq.heappop(free)
        heapq.heappush(free, began + slow * work)
        answers.append(Answer(end_seconds=began + slow * work, seconds=slow * work, work=work))
    return Rehearsal(seconds=start + max(answer.end_seconds for answer in answers), answers=tuple(answers))


@given(st.integers(1, 16), st.floats(0.01, 10), st.floats(0, 100), st.integers(1, 20))
def test_examples_of_one_length(at_once: int, work: float, start: float, rounds: int) -> None:
    seen = [evaluation([work] * (2 * at_once), at_once, start), evaluation([work] * (4 * at_once), at_once, start)]
    assert num_at_once(seen[0].answers) == at_once
    number = rounds * at_once
    assert evaluation_seconds(seen, number).seconds == pytest.approx(
        evaluation([work] * number, at_once, start).seconds, rel=1e-6
    )


@pytest.mark.parametrize("at_once", [1, 4, 16])
def test_answers_that_came_early_are_the_short_ones(at_once: int) -> None:
    """Lengths as of a model that stops early or not at all. In the mean over many tasks nothing is too small or too large."""
    ratios: list[float] = []
    for seed in range(100):
        draw = random.Random(seed)
        works = [draw.choice((0.1, 2.0)) for _ in range(300)]
        found = evaluation_seconds([evaluation(works[: 4 * at_once], at_once)], 300)
        ratios.append(found.seconds / evaluation(works, at_once).seconds)
    assert fmean(ratios) == pytest.approx(1.0, abs=0.06 if at_once > 1 else 0.15)


def test_intervals_hold_what_they_say() -> None:
    """Of evaluations whose lengths are drawn at random, on a machine whose speed changes by 10 %, about eight in ten lie inside."""
    draw, inside = random.Random(7), 0
    for _ in range(200):
        works = [draw.expovariate(1.0) for _ in range(400)]
        runs = [evaluation(works[:number], 16, slow=draw.lognormvariate(0, 0.1)) for number in (32, 100)]
        found = evaluation_seconds(runs, 400)
        inside += found.low <= evaluation(works, 16, slow=draw.lognormvariate(0, 0.1)).seconds <= found.high
    assert 140 <= inside <= 195


def test_the_second_rehearsal_is_long_enough() -> None:
    first = evaluation([1.0] * 32, 16)
    assert second_number(first, 164) == 80, "one more takes 0.125 s"
    assert second_number(first, 50) == 50 and second_number(evaluation([100.0] * 32, 16), 164) == 32


def test_estimates_without_a_task() -> None:
    assert one_after_another(10.0, 512.0, 256.0, 50).seconds == 110.0
    assert one_after_another(10.0, 512.0, 256.0, 50).as_json(36.0)["usd"] == pytest.approx(1.1)


def test_estimates_are_shown_in_one_unit() -> None:
    times = {"50": around(100.0, 0.1).as_json(36.0), "164": around(240.0, 0.1).as_json(0.0)}
    lines = estimate_lines({"examples": times, "training": {"steps": 2000, **around(3e5, 0.1).as_json(0.0)}, "basis": "so"})
    assert lines[:2] == ["50 examples: 100.0 s (84.9 to 117.8), $1.00", "164 examples: 4.0 min (3.4 to 4.7)"]
    assert lines[2:] == ["training, 2,000 steps: 3.5 days (2.9 to 4.1)", "(so)"]


def test_drift_is_of_the_same_thing_measured_again() -> None:
    assert drift([3.0]) == 2 * STEADY, "nothing is known"
    assert drift([3.0, 3.0]) == STEADY and drift([1.0, 1.5]) > 0.2


def test_what_is_a_small_part_of_the_time_is_a_small_part_of_the_interval() -> None:
    """Starts of 3 s that are alike, answers in a tenth of a second that are not."""
    found = evaluation_seconds([evaluation([0.01] * 32, 16), evaluation([0.01] * 64, 16, slow=4.0)], 50)
    assert found.high / found.low < 1.3


def test_other_programs_widen_the_interval_and_are_named() -> None:
    runs = [evaluation([1.0] * 32, 16), evaluation([1.0] * 64, 16)]
    alone, beside = evaluation_seconds(runs, 50), evaluation_seconds(runs, 50, others=0.5)
    assert alone.seconds == beside.seconds and beside.high > 1.5 * alone.high
    assert of_others(0.01) == "" and of_others(0.5) == "; other programs used 50% of the CPUs meanwhile"


def test_what_other_programs_use_is_seen() -> None:
    stat = "cpu  100 200 300 4000 500 60 70 8 0 0\ncpu0 1 2\n"
    assert busy_seconds(stat) * os.sysconf("SC_CLK_TCK") == 730, "not idle, not waiting for disks"
    others = OtherPrograms()
    assert 0 <= others.share() <= 1


STEPS_OF_A_SECOND = [1.0] * 12


def logged(steps: Sequence[float], pauses: Mapping[int, float]) -> list[dict[str, Any]]:
    now, lines = 100.0, list[dict[str, Any]]()
    for step, seconds in enumerate(steps, start=1):
        now += seconds
        lines.append({"step": step, "loss": 1.0, "seconds": seconds, "time": now, "tokens": 2048 * step})
        now += pauses.get(step, 0.0)
    return lines


def test_times_of_a_log() -> None:
    """Steps of a second each, validations of 0.5 s behind steps 4 and 8 and a checkpoint of 2 s behind step 6."""
    found = times_of(logged(STEPS_OF_A_SECOND, {4: 0.5, 6: 2.0, 8: 0.5}), wall_seconds=20.0)
    assert found.validation_seconds == pytest.approx((0.5, 0.5)) and found.checkpoint_seconds == pytest.approx((2.0,))
    assert found.start_seconds == pytest.approx(5.0)
    schedule = Schedule(steps=100, save_steps=40, validation_steps=20)
    assert training_seconds([found], schedule).seconds == pytest.approx(5 + 100 + 2 * 2.0 + 4 * 0.5), "none after the last step"


def test_a_step_that_compiled_is_not_the_usual_one() -> None:
    run = TrainingTimes(start_seconds=5.0, step_seconds=(30.0, 10.0, *STEPS_OF_A_SECOND))
    assert run.usual_step == 1.0
    assert training_seconds([run], Schedule(steps=100)).seconds == pytest.approx(5 + 29 + 100)
    slower = TrainingTimes(start_seconds=0.0, step_seconds=(2.0,) * 12)
    both = training_seconds([run, slower], Schedule(steps=100))
    assert both.high / both.low > 2, "the machine's speed changes"


def test_fast_steps_are_timed_in_a_longer_run() -> None:
    assert longer_steps([TrainingTimes(start_seconds=1.0, step_seconds=(0.1,) * 12)], 200) == 60
    assert longer_steps([TrainingTimes(start_seconds=1.0, step_seconds=(0.1,) * 12)], 30) == 30
    assert longer_steps([TrainingTimes(start_seconds=1.0, step_seconds=(1.0,) * 12)], 200) == 0


def test_a_recipe_that_says_tokens_and_a_decay_of_its_own(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "recipes" / "tiny-glm-moe-cpu.toml").read_text()
    text = text.replace("steps = 200\nwarmup_steps = 20", 'name = "wsd"\ndecay_steps = 100').replace(
        "[data]", '[data]\ntokens = "1M"'
    )
    (tmp_path / "recipe.toml").write_text(text)
    recipe = load_recipe(str(tmp_path / "recipe.toml"))
    shortened = [word for key, value in drill_settings(recipe).items() for word in (f"{key}={value}",)]
    assert load_recipe(str(tmp_path / "recipe.toml"), shortened).schedule.steps == 12, "twelve steps would be less than the decay"
    plan = plan_recipe(recipe, str(tmp_path / "recipe.toml"))
    schedule = schedule_of(recipe, plan, logged(STEPS_OF_A_SECOND, {}))
    assert schedule.steps == 489 and schedule.save_steps == 50 and schedule.save_seconds is None
