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

from windlass.cli.check.options import CheckOptions, Found, plan_row, problem_of, say
from windlass.errors import Error
from windlass.runtime.machine.health.other_programs import OtherPrograms
from windlass.tasks.check.model.estimate import Schedule, TrainingTimes, of_others, training_seconds
from windlass.tasks.check.model.recipe import DataFacts, DrillFacts, judge_data, judge_drill
from windlass.tasks.check.needs import needs_of_plan
from windlass.tasks.check.report import Check, failed, passed

if TYPE_CHECKING:
    from windlass.core.plan import Plan
    from windlass.core.recipe.recipe import Recipe

STEPS, KILL_AFTER = 12, 5
VALIDATE, SAVE = 4, 6
"""In the tiny run: a validation after steps 4, 8 and 12, a checkpoint after 6 and 12; so each is timed apart."""
SECONDS = 1800.0
ENOUGH_SECONDS = 6.0
"""Of steps that were timed. Faster ones are timed again in a longer run: a machine's speed changes from one second to the next."""


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
    return _drill(found, recipe, plan, options)


def _tokens(recipe: Recipe) -> int:
    return recipe.data.tokens or 0


def _data(recipe: Recipe, options: CheckOptions) -> DataFacts:
    from windlass.tasks.train.data.shards import find_damage, open_shards, read_manifest

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


def _drill(found: Found, recipe: Recipe, plan: Plan, options: CheckOptions) -> Found:
    say(options, f"training {STEPS} steps, then again with a kill")
    others = OtherPrograms()
    with tempfile.TemporaryDirectory(prefix="windlass-check-", dir=options.folder) as place:
        folder = Path(place)
        problem, times = _timed(options, folder / "whole", drill_settings(recipe))
        problem = problem or _train(options, folder / "killed", drill_settings(recipe), kill=True)
        whole, resumed = _lines(folder / "whole"), _lines(folder / "killed")
        rows: list[Check] = judge_drill(DrillFacts(whole=_losses(whole), resumed=_losses(resumed), problem=problem))
        if problem:
            return msgspec.structs.replace(found, rows=(*found.rows, *rows))
        runs = [times, TrainingTimes(start_seconds=0.0, step_seconds=_step_seconds(resumed))]
        schedule = schedule_of(recipe, plan, whole)
        runs += _longer(options, folder / "longer", runs, recipe, schedule.steps)
    share = others.share()
    total = training_seconds(runs, schedule, share)
    timed = sum(len(run.step_seconds) for run in runs)
    estimates = {
        "training": {"steps": schedule.steps, **total.as_json(options.price or plan.cost.usd_per_hour)},
        "basis": f"from {timed} steps of this recipe, {runs[0].usual_step:.3g} s each{of_others(share)}",
    }
    return Found(needs=found.needs, rows=(*found.rows, *rows), estimates=estimates)


def _timed(options: CheckOptions, out: Path, settings: dict[str, int]) -> tuple[str, TrainingTimes]:
    """A run to its end: what went wrong, and its times."""
    began = time.monotonic()
    problem = _train(options, out, settings)
    return problem, times_of(_lines(out), time.monotonic() - began)


def _longer(options: CheckOptions, out: Path, runs: Sequence[TrainingTimes], recipe: Recipe, steps: int) -> list[TrainingTimes]:
    """A run of as many steps as take ENOUGH_SECONDS, if those before took less."""
    number = longer_steps(runs, steps)
    if not number:
        return []
    say(options, f"timing {number} steps")
    settings = _shortened(recipe, number) | {"checkpoint.interval_steps": number, "checkpoint.keep": 1}
    problem, times = _timed(options, out, settings)
    return [] if problem else [msgspec.structs.replace(times, checkpoint_seconds=(), validation_seconds=())]


def longer_steps(runs: Sequence[TrainingTimes], steps: int) -> int:
    """0: what there is is enough."""
    seconds, each = sum(sum(run.step_seconds) for run in runs), runs[0].usual_step
    return min(round(ENOUGH_SECONDS / each), steps) if each and seconds < ENOUGH_SECONDS else 0


def schedule_of(recipe: Recipe, plan: Plan, lines: Sequence[dict[str, Any]]) -> Schedule:
    """Steps: the recipe's, or as many as its tokens take; `lines`: of the tiny run, which say how many tokens a step has."""
    each = next((int(line["tokens"]) for line in lines if line.get("step") == 1 and line.get("tokens")), 0)
    counted = -(-(recipe.data.tokens or 0) // each) if each else 0
    minutes = recipe.checkpoint.interval_minutes
    planned = (plan.train or {}).get("checkpoint", {}).get("interval_seconds")
    by_plan = planned if recipe.checkpoint.interval_steps is None else None
    return Schedule(
        steps=recipe.schedule.steps or counted,
        save_steps=recipe.checkpoint.interval_steps,
        save_seconds=by_plan if minutes is None else 60 * minutes,
        validation_steps=recipe.validation.interval_steps,
    )


def times_of(lines: Sequence[dict[str, Any]], wall_seconds: float) -> TrainingTimes:
    """Steps by the log; validation and checkpoint by the gaps behind the steps at which they happen."""
    steps = [line for line in lines if "loss" in line and "seconds" in line]
    gaps = {
        int(one["step"]): max(float(other["time"]) - float(one["time"]) - float(other["seconds"]), 0.0)
        for one, other in pairwise(steps)
    }
    seconds = _step_seconds(lines)
    inside = sum(seconds) + sum(gaps.values())
    return TrainingTimes(
        start_seconds=max(wall_seconds - inside, 0.0),
        step_seconds=seconds,
        checkpoint_seconds=tuple(gap for step, gap in gaps.items() if step == SAVE),
        validation_seconds=tuple(gap for step, gap in gaps.items() if step % VALIDATE == 0),
    )


def _step_seconds(lines: Sequence[dict[str, Any]]) -> tuple[float, ...]:
    return tuple(float(line["seconds"]) for line in lines if "loss" in line and "seconds" in line)


def drill_settings(recipe: Recipe) -> dict[str, int]:
    """Few steps, with checkpoints and validations at steps of their own."""
    changes = _shortened(recipe, STEPS) | {"checkpoint.interval_steps": SAVE, "checkpoint.keep": 2}
    return changes | ({"validation.interval_steps": VALIDATE} if recipe.validation.interval_steps else {})


def _shortened(recipe: Recipe, steps: int) -> dict[str, int]:
    """The same schedule in fewer steps; warmup and decay must fit into them."""
    decay = {} if recipe.schedule.decay_steps is None else {"schedule.decay_steps": 1}
    return {"schedule.steps": steps, "schedule.warmup_steps": 1, **decay}


def _train(options: CheckOptions, out: Path, settings: dict[str, int], kill: bool = False) -> str:
    """Why it did not end; empty if it did."""
    words = [sys.executable, "-P", "-m", "windlass", "train", "run", options.target, "--out", str(out), "--continue"]
    words += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
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
