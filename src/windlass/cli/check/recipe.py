"""A recipe: its plan, its data; with --full a tiny run of the same layout that is killed and resumed, and how long all steps take."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from windlass.check.model.estimate import TrainingTimes, training_seconds
from windlass.check.model.recipe import DataFacts, DrillFacts, judge_data, judge_drill
from windlass.check.needs import needs_of_plan
from windlass.check.report import Check, failed, passed
from windlass.cli.check.options import CheckOptions, Found, plan_row, problem_of, say
from windlass.errors import Error

if TYPE_CHECKING:
    from windlass.core.recipe.recipe import Recipe

STEPS, KILL_AFTER = 12, 5
VALIDATE, SAVE = 4, 6
"""In the tiny run: a validation after steps 4, 8 and 12, a checkpoint after 6 and 12; so each is timed apart."""
SECONDS = 1800.0


def check_recipe(options: CheckOptions) -> Found:
    from windlass.cli.plan.training import plan_recipe
    from windlass.core.recipe.recipe import load_recipe

    recipe = load_recipe(options.target)
    try:
        plan = plan_recipe(recipe, options.target)
    except Error as error:
        return Found(rows=(failed("plan", problem_of(error), "a plan for this machine", "see `windlass plan`"),))
    data = _data(recipe, options)
    rows = [passed("recipe", f"{options.target} is understood"), plan_row(plan), *judge_data(data, _tokens(recipe))]
    found = Found(needs=needs_of_plan(plan), rows=tuple(rows))
    if not options.full or any(row.state == "fail" for row in rows):
        return found
    return _drill(found, recipe, options, options.price or plan.cost.usd_per_hour)


def _tokens(recipe: Recipe) -> int:
    return recipe.data.tokens or 0


def _data(recipe: Recipe, options: CheckOptions) -> DataFacts:
    from windlass.train.data.shards import find_damage, open_shards, read_manifest

    problems: list[str] = []
    num_tokens = num_shards = 0
    for source in recipe.data.sources:
        folder = Path(options.target).parent / source.path
        try:
            manifest = read_manifest(folder)
            for split in ("train", "validation"):
                open_shards(folder, manifest, split)  # checks that files are there, and their sizes
            problems += find_damage(folder, manifest) if options.full else []
            num_tokens += sum(shard.num_tokens for shard in manifest.of_split("train"))
            num_shards += len(manifest.shards)
        except Error as error:
            problems.append(problem_of(error))
    return DataFacts(num_tokens=num_tokens, num_shards=num_shards, problems=tuple(problems), digests=options.full)


# --- the tiny run


def _drill(found: Found, recipe: Recipe, options: CheckOptions, price: float) -> Found:
    say(options, f"training {STEPS} steps, then again with a kill")
    with tempfile.TemporaryDirectory(prefix="windlass-check-", dir=options.folder) as folder:
        began = time.monotonic()
        problem = _train(options, Path(folder) / "whole", recipe, kill=False)
        wall = time.monotonic() - began
        problem = problem or _train(options, Path(folder) / "killed", recipe, kill=True)
        whole, resumed = _lines(Path(folder) / "whole"), _lines(Path(folder) / "killed")
    rows: list[Check] = judge_drill(DrillFacts(whole=_losses(whole), resumed=_losses(resumed), problem=problem))
    if problem:
        return msgspec.structs.replace(found, rows=(*found.rows, *rows))
    steps = recipe.schedule.steps or 0
    seconds = total_seconds(times_of(whole, wall), recipe, steps)
    estimates = {
        "training": {"steps": steps, "seconds": seconds, "usd": seconds / 3600 * price},
        "basis": f"from {STEPS} steps of this recipe, measured",
    }
    return Found(needs=found.needs, rows=(*found.rows, *rows), estimates=estimates)


def total_seconds(times: TrainingTimes, recipe: Recipe, steps: int) -> float:
    saves = steps // recipe.checkpoint.interval_steps if recipe.checkpoint.interval_steps else 0
    validations = steps // recipe.validation.interval_steps if recipe.validation.interval_steps else 0
    return training_seconds(times, steps, saves, validations)


def times_of(lines: Sequence[dict[str, Any]], wall_seconds: float) -> TrainingTimes:
    """Steps by the log; validation and checkpoint by the gaps behind the steps at which they happen."""
    steps = [line for line in lines if "loss" in line and "seconds" in line]
    gaps = {
        int(one["step"]): max(float(other["time"]) - float(one["time"]) - float(other["seconds"]), 0.0)
        for one, other in pairwise(steps)
    }
    seconds = tuple(float(line["seconds"]) for line in steps)
    inside = sum(seconds) + sum(gaps.values())
    return TrainingTimes(
        start_seconds=max(wall_seconds - inside, 0.0),
        step_seconds=seconds,
        checkpoint_seconds=gaps.get(SAVE, 0.0),
        validation_seconds=gaps.get(VALIDATE, 0.0),
    )


def _settings(recipe: Recipe) -> list[str]:
    """Few steps of the same schedule."""
    changes = {"schedule.steps": STEPS, "schedule.warmup_steps": 1, "checkpoint.interval_steps": SAVE, "checkpoint.keep": 2}
    if recipe.validation.interval_steps:
        changes["validation.interval_steps"] = VALIDATE
    return [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]


def _train(options: CheckOptions, out: Path, recipe: Recipe, kill: bool) -> str:
    """Why it did not end; empty if it did."""
    words = [
        sys.executable,
        "-P",
        "-m",
        "windlass",
        "train",
        "run",
        options.target,
        "--out",
        str(out),
        "--continue",
        *_settings(recipe),
    ]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        if kill:
            _wait_for_step(process, out)
            process.send_signal(signal.SIGKILL)
            process.communicate()
            process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        _, errors = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"a run of {STEPS} steps took longer than {SECONDS:.0f} s"
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    return "" if process.returncode == 0 else (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]


def _wait_for_step(process: subprocess.Popen[str], out: Path) -> None:
    """Until some steps are done, or the process has ended."""
    end = time.monotonic() + SECONDS
    while process.poll() is None and time.monotonic() < end and max(_losses(_lines(out)), default=0) < KILL_AFTER:
        time.sleep(0.05)


def _lines(out: Path) -> list[dict[str, Any]]:
    """Whole lines of log.jsonl."""
    file = out / "log.jsonl"
    if not file.is_file():
        return []
    text = file.read_text(errors="replace")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines() if line.startswith("{")]


def _losses(lines: Sequence[dict[str, Any]]) -> dict[int, float]:
    """By step; a step that was repeated counts as it was last."""
    return {int(line["step"]): float(line["loss"]) for line in lines if "loss" in line and "step" in line}
