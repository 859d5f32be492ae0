"""Training runs that are killed again and again, and what comes of them. Run: python bench/train/kills.py [--kills 50] [--points]

Every run is a process of its own, forked from this one so that kills fall into the work and not into imports. It trains the tiny recipe
and saves after every step, so most kills fall into a save. With `--kills` it gets SIGKILL at a random moment; then every checkpoint
that has a name is read through and must be whole, and the run is resumed; in the end its weights, its optimizer and its losses must
be those of a run that nobody disturbed, bit for bit. With `--points` a process that saves and removes checkpoints ends, without a
word, at every single sync, rename, unlink and rmdir in turn, and what is there must load.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "tasks" / "train"))

import tiny_run
import torch
import torch.distributed.checkpoint

from windlass.cli import execute as windlass
from windlass.cli.train import worker as train_worker
from windlass.tasks.train import build
from windlass.tasks.train.checkpoint import CheckpointIdentity, Checkpoints
from windlass.tasks.train.checkpoint import folder as folders
from windlass.tasks.train.checkpoint.manifest import check_files, read_manifest
from windlass.tasks.train.checkpoint.tensors import CheckpointTensors
from windlass.tasks.train.export import export
from windlass.tasks.train.logging.jsonl import read_samples
from windlass.tasks.train.loop import elastic, loop

IMPORTED = (train_worker, build, elastic, export, loop, torch.distributed.checkpoint)
"""Here, and so not in the children."""
STEPS = 40


# --- one run ----------------------------------------------------------------------------------------------------------


def start(work: Callable[[], int]) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    try:
        code = work()
    except BaseException as error:  # noqa: BLE001 - a child must not go on with its parent's work
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        code = 1
    os._exit(code)


def start_run(recipe: Path, out: Path, steps: int) -> int:
    def work() -> int:
        os.dup2(os.open(out.with_suffix(".txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 2)
        os.dup2(2, 1)
        torch.set_num_threads(1)
        settings = [f"schedule.steps={steps}", "schedule.warmup_steps=4", "checkpoint.interval_steps=1", "batch.global_batch=4"]
        settings += ["batch.micro_batch=4", "validation.samples=4", "validation.interval_steps=10"]
        words = [word for setting in settings for word in ("--set", setting)]
        resume = ["--resume"] if folders.named_steps(out / "checkpoints") else []
        return windlass(["train", "run", str(recipe), "--out", str(out), *words, *resume])

    return start(work)


def finish(recipe: Path, out: Path, steps: int) -> float:
    began = time.monotonic()
    _, status = os.waitpid(start_run(recipe, out, steps), 0)
    if status != 0:
        raise SystemExit(f"a run that nobody killed failed ({status}): {out.with_suffix('.txt').read_text()[-2000:]}")
    return time.monotonic() - began


def weights(out: Path) -> dict[str, Any]:
    """What the last checkpoint holds of model and optimizer, and the losses of all steps."""
    step = folders.named_steps(out / "checkpoints")[-1]
    tensors = CheckpointTensors(out / "checkpoints" / folders.step_name(step))
    found: dict[str, Any] = {name: tensors.tensor(name).clone() for name in tensors.names()}
    samples, events = read_samples(out / "log.jsonl")
    losses = {sample["step"]: (sample["loss"], sample["grad_norm"]) for sample in samples}
    held = {event["step"]: event["loss"] for event in events if event["event"] == "validation"}
    return {"step": step, "tensors": found, "losses": losses, "validation": held}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    tensors = left["tensors"].keys() == right["tensors"].keys() and all(
        torch.equal(value, right["tensors"][name]) for name, value in left["tensors"].items()
    )
    return tensors and all(left[key] == right[key] for key in ("step", "losses", "validation"))


def damaged(checkpoints: Path) -> list[str]:
    """Of those that have a name, which are not whole."""
    found: list[str] = []
    for step in folders.named_steps(checkpoints):
        path = checkpoints / folders.step_name(step)
        try:
            manifest = read_manifest(path)
            check_files(path, manifest, manifest.files)
        except Exception as error:  # noqa: BLE001 - whatever it is, the checkpoint is not whole
            found.append(f"{path.name}: {error}")
    return found


def stage(checkpoints: Path) -> str:
    names = [path.name for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
    if not folders.named_steps(checkpoints):
        return "before the first checkpoint"
    if any(name.endswith(".tmp") for name in names):
        return "while saving"
    return "while removing an old one" if any(name.endswith((".old", ".gone")) for name in names) else "between saves"


# --- random moments ---------------------------------------------------------------------------------------------------


def random_kills(folder: Path, kills: int, seed: int, steps: int) -> dict[str, Any]:
    draw = random.Random(seed)
    recipe = tiny_run.make(folder)
    usual = finish(recipe, folder / "whole", steps)
    expected = weights(folder / "whole")
    done = runs = identical = 0
    stages: Counter[str] = Counter()
    broken: list[str] = []
    while done < kills:
        out = folder / f"run-{runs}"
        for _ in range(min(draw.randint(2, 8), kills - done)):
            child = start_run(recipe, out, steps)
            time.sleep(draw.uniform(0.1, 0.8) * usual / 2)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            done += 1
            stages[stage(out / "checkpoints")] += 1
            broken += damaged(out / "checkpoints")
        finish(recipe, out, steps)
        identical += same(weights(out), expected)
        runs += 1
    return {"kills": done, "runs": runs, "identical": identical, "damaged": broken, "stages": dict(stages), "seconds": usual}


# --- every point ------------------------------------------------------------------------------------------------------

CALLS = ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir")


def made_up(step: int) -> dict[str, Any]:
    return {"model": {"weight": torch.full((64, 64), float(step)), "bias": torch.full((3,), float(step))}, "progress": str(step)}


def save_and_end(out: Path, point: int, told: int) -> int:
    """Saves steps 1 to 5, the third of them twice, and tells which are done; ends at that call, which is not made."""
    left = [point]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*given: Any, **how: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os._exit(9)
            return call(*given, **how)

        return made

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    run = Checkpoints(out, CheckpointIdentity(model="made up", spec="1"), keep_last=2)
    for step in (1, 2, 3, 3, 4, 5):
        run.save(step, made_up(step), wait=True)
        os.write(told, bytes([step]))
    return 0


def every_point(folder: Path, stride: int) -> dict[str, Any]:
    points, broken = 0, list[str]()
    stages: Counter[str] = Counter()
    for point in range(1, 10_000, stride):
        out = folder / f"point-{point}"
        reading, writing = os.pipe()
        child = start(lambda point=point, out=out, told=writing: save_and_end(out, point, told))
        os.close(writing)
        _, status = os.waitpid(child, 0)
        told = os.read(reading, 100)
        os.close(reading)
        stages[stage(out)] += 1
        broken += [f"point {point}: {line}" for line in damaged(out)] + _not_loaded(out, point, told[-1] if told else 0)
        points += 1
        if os.waitstatus_to_exitcode(status) == 0:
            break
    return {"points": points, "damaged": broken, "stages": dict(stages)}


def _not_loaded(out: Path, point: int, least: int) -> list[str]:
    """The next run goes on from what the last one called saved, or from the one after it."""
    run = Checkpoints(out, CheckpointIdentity(model="made up", spec="1"), notify=lambda _: None)
    try:
        if least == 0 and run.latest() is None:
            return []
        into = made_up(0)
        step = run.load(into)
        right = step in (least, least + 1) and bool((into["model"]["weight"] == step).all()) and into["progress"] == str(step)
        return [] if right else [f"point {point}: step {step} was loaded, where {least} was saved"]
    except Exception as error:  # noqa: BLE001 - whatever it is, it did not load
        return [f"point {point}: {error}"]
    finally:
        run.close()


def main() -> int:
    parser = argparse.ArgumentParser(description="Kills training runs and looks at what is left.")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--points", type=int, nargs="?", const=1, default=0, help="instead: every point, or every so many")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if given.points:
            found = every_point(Path(folder), given.points)
        else:
            found = random_kills(Path(folder), given.kills, given.seed, given.steps)
    print(json.dumps(found))
    return 1 if found["damaged"] or found.get("identical", 0) != found.get("runs", 0) else 0


if __name__ == "__main__":
    sys.exit(main())
