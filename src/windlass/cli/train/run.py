"""What `windlass train run` does with its words: reads the recipe, checks that it fits, and runs it here or in several processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from windlass.cli.console import console
from windlass.core.recipe.recipe import Recipe, load_recipe
from windlass.errors import BadInput, DoesNotFit, Error, MissingExtra
from windlass.units import format_bytes, format_seconds


class Options(msgspec.Struct, frozen=True, kw_only=True):
    resume: bool = False
    settings: tuple[str, ...] = ()
    nproc: int = 1
    max_restarts: int | None = None
    out: Path | None = None
    plan_only: bool = False
    force: bool = False
    profile: bool = False
    prometheus: int | None = None
    tensorboard: bool = False
    as_json: bool = False


class RunFailed(Error):
    """The run's processes ended; what they said stands above."""

    exit_code = 4


def run_recipe(path: Path, options: Options) -> int:
    recipe = load_recipe(path, options.settings)
    _check(options)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # one of several: torchrun, ours or the user's, has started this process
        return _train(path, recipe, options)
    if not _fits(path, recipe, options):
        return DoesNotFit.exit_code
    if options.plan_only:
        return 0
    _need_torch()
    if options.nproc == 1 and not options.max_restarts:
        return _train(path, recipe, options)
    return _train_in_many(path, recipe, options)


def run_folder(path: Path, recipe: Recipe, out: Path | None) -> Path:
    """Where checkpoints and the log go: --out, or as the recipe says, or a folder of its name beside it."""
    if out is not None:
        return out
    return path.parent / (recipe.run.folder or f"{path.stem}-run")


def _check(options: Options) -> None:
    if options.nproc < 1:
        raise BadInput(f"--nproc is {options.nproc}; it takes at least 1 process")
    if options.max_restarts is not None and options.max_restarts < 0:
        raise BadInput(f"--max-restarts is {options.max_restarts}; 0 means never")
    if options.prometheus is not None and not 0 <= options.prometheus < 65536:
        raise BadInput(f"--prometheus {options.prometheus}: ports are 1 to 65535, and 0 is any that is free")


def _need_torch() -> None:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise MissingExtra("torch", "train", "training")


# --- does it fit


def _fits(path: Path, recipe: Recipe, options: Options) -> bool:
    """Planned on the recipe's hardware, or on this machine; a plan that does not fit is shown whole, with what would."""
    from windlass.cli.plan.training import plan_recipe

    plan = plan_recipe(recipe, str(path))
    assert plan.train is not None
    if plan.fits and not options.plan_only:
        if not options.as_json:
            fullest = max(plan.memory.per_device, key=lambda device: device.total_bytes)
            step = format_seconds(plan.train["step_seconds"])
            console().print(
                f"fits {plan.hardware}: {format_bytes(fullest.total_bytes)} of {format_bytes(fullest.capacity_bytes)}, {step} a step predicted"
            )
        return True
    from windlass.cli.plan.table import show

    show(plan, saved=[])
    if not plan.fits and options.force:
        print("windlass: started all the same, because of --force", file=sys.stderr)
        return True
    return plan.fits


# --- running


def _train(path: Path, recipe: Recipe, options: Options) -> int:
    from windlass.cli.train.worker import Wanted, train

    folder = run_folder(path, recipe, options.out)
    wanted = Wanted(
        resume=options.resume,
        profile=options.profile,
        prometheus=options.prometheus,
        tensorboard=options.tensorboard,
        as_json=options.as_json,
        checkpoint_seconds=_planned_interval(path, recipe),
    )
    return train(path, recipe, folder, wanted)


def _planned_interval(path: Path, recipe: Recipe) -> float | None:
    """Young and Daly's, of the plan; where the recipe says it, or nothing fits, the plan is not asked."""
    if recipe.checkpoint.interval_minutes is not None or recipe.checkpoint.interval_steps is not None:
        return None
    from windlass.cli.plan.training import plan_recipe

    train = plan_recipe(recipe, str(path)).train
    return (train or {}).get("checkpoint", {}).get("interval_seconds")


DEFAULT_RESTARTS = 3


def _train_in_many(path: Path, recipe: Recipe, options: Options) -> int:
    from windlass.train.loop.elastic import run_workers
    from windlass.train.loop.guard import STOPPED

    folder = run_folder(path, recipe, options.out)
    restarts = DEFAULT_RESTARTS if options.max_restarts is None else options.max_restarts
    outcome = run_workers(_arguments(path, options), options.nproc, restarts, folder)
    if outcome.kind == "failed":
        error = RunFailed(outcome.message or "the run failed")
        error.exit_code = outcome.exit_code or RunFailed.exit_code
        raise error
    return STOPPED if outcome.kind == "stopped" else 0


def _arguments(path: Path, options: Options) -> list[str]:
    """The same command again, for a process that will find torchrun's variables."""
    words = ["-m", "windlass", "train", "run", str(path)]
    words += [word for setting in options.settings for word in ("--set", setting)]
    words += ["--out", str(options.out)] if options.out is not None else []
    words += ["--prometheus", str(options.prometheus)] if options.prometheus is not None else []
    flags = {
        "--resume": options.resume,
        "--profile": options.profile,
        "--tensorboard": options.tensorboard,
        "--json": options.as_json,
    }
    return words + [flag for flag, given in flags.items() if given]
