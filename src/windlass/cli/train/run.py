"""`windlass train run`: reads the recipe, plans it once, and trains in this process or in several workers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from windlass.cli.console import console
from windlass.cli.train.options import TrainingRun, TrainOptions, num_nodes
from windlass.cli.train.phases import Phases
from windlass.core.plan import Plan, encode_plan, load_plan
from windlass.core.recipe.recipe import Recipe, load_recipe
from windlass.errors import STOPPED, BadInput, DoesNotFit, Error, MissingExtra
from windlass.units import format_bytes, format_seconds

DEFAULT_RESTARTS = 3
PLAN_FILE = "plan.json"
"""In the run's folder: hands the plan to worker processes."""


class RunFailed(Error):
    """The worker processes failed; their messages were printed."""

    exit_code = 4


def run_recipe(path: Path, options: TrainOptions) -> int:
    recipe = load_recipe(path, options.settings)
    _check(options)
    if "TORCHELASTIC_RUN_ID" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1:  # a rank of torchrun's, or of srun's
        return _train(path, recipe, options, _worker_plan(path, recipe, options))
    from windlass.cli.plan.training import plan_recipe

    _check_arrangement(recipe, options)
    plan = plan_recipe(recipe, str(path), num_nodes=num_nodes(options)[1], nproc=options.nproc)
    _show_plan(plan, options)
    if not plan.fits and not options.force:
        return DoesNotFit.exit_code
    if options.plan_only:
        return 0
    _need_torch()
    _check_machine(run_folder(path, recipe, options.out), options)
    if options.nproc == 1 and not options.max_restarts and num_nodes(options)[1] == 1:
        return _train(path, recipe, options, plan)
    return _train_in_workers(path, recipe, options, plan)


def _check_arrangement(recipe: Recipe, options: TrainOptions) -> None:
    """Before the plan, whose advice is for other trainers as well. What is only planned, for named hardware, may be for one of them."""
    from windlass.open.hardware import most_processes, resolve_hardware
    from windlass.tasks.train.parallel.degrees import check_arrangement

    if options.plan_only and recipe.hardware.on is not None:
        return
    most = most_processes(resolve_hardware(None))
    if most is not None and options.nproc > most:
        raise BadInput(
            f"--nproc {options.nproc}: this machine has {most} GPU{'' if most == 1 else 's'}, and each process needs one"
        )
    check_arrangement(recipe, options.nproc, num_nodes(options)[1], most)


def _check_machine(folder: Path, options: TrainOptions) -> None:
    from windlass.cli.check.quick import check_before

    check_before("train run", folder, num_machines=num_nodes(options)[1], shown=not options.as_json)


def run_folder(path: Path, recipe: Recipe, out: Path | None) -> Path:
    """Where checkpoints and logs go: --out, or run.folder, or `<recipe>-run` beside the recipe."""
    if out is not None:
        return out
    return path.parent / (recipe.run.folder or f"{path.stem}-run")


def _check(options: TrainOptions) -> None:
    if options.nproc < 1:
        raise BadInput(f"--nproc is {options.nproc}; it must be at least 1")
    if options.max_restarts is not None and options.max_restarts < 0:
        raise BadInput(f"--max-restarts is {options.max_restarts}; it must be at least 0")
    if options.prometheus is not None and not 0 <= options.prometheus < 65536:
        raise BadInput(f"--prometheus {options.prometheus}: use a port from 1 to 65535, or 0 for any free one")


def _need_torch() -> None:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise MissingExtra("torch", "train", "training")


# --- the plan


def _show_plan(plan: Plan, options: TrainOptions) -> None:
    """One line if it fits; the whole plan if it does not, or with --plan."""
    if plan.fits and not options.plan_only:
        if not options.as_json:
            console().print(_fits_line(plan))
        return
    from windlass.cli.plan.table import show

    show(plan, saved=[])
    if not plan.fits and options.force:
        print("windlass: starting although it does not fit (--force)", file=sys.stderr)


def _fits_line(plan: Plan) -> str:
    assert plan.train is not None
    fullest = max(plan.memory.per_device, key=lambda device: device.total_bytes)
    used = f"{format_bytes(fullest.total_bytes)} of {format_bytes(fullest.capacity_bytes)}"
    return f"fits on {plan.hardware}: {used}, predicted {format_seconds(plan.train['step_seconds'])} per step"


def _worker_plan(path: Path, recipe: Recipe, options: TrainOptions) -> Plan | None:
    """The plan of the command that started the workers. Under the user's own torchrun there is none: planned here, if it is needed."""
    if options.plan_file is not None:
        return load_plan(options.plan_file.read_bytes())
    if not _plans_interval(recipe):
        return None
    from windlass.cli.plan.training import plan_recipe

    world, here = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return plan_recipe(recipe, str(path), num_nodes=max(world // here, 1), nproc=here)


def _plans_interval(recipe: Recipe) -> bool:
    """Whether the checkpoint interval is the planner's (Young and Daly) and not the recipe's."""
    return recipe.checkpoint.interval_minutes is None and recipe.checkpoint.interval_steps is None


def _checkpoint_seconds(recipe: Recipe, plan: Plan | None) -> float | None:
    train = plan.train if plan is not None and _plans_interval(recipe) else None
    return (train or {}).get("checkpoint", {}).get("interval_seconds")


# --- running


def _train(path: Path, recipe: Recipe, options: TrainOptions, plan: Plan | None) -> int:
    from windlass.cli.plan.training import recipe_model
    from windlass.cli.train.worker import train

    planned_spec = plan.spec if plan is not None else None
    return train(
        TrainingRun(
            path=path,
            recipe=recipe,
            folder=run_folder(path, recipe, options.out),
            spec=planned_spec if planned_spec is not None else recipe_model(recipe, str(path)).spec,
            options=options,
            checkpoint_seconds=_checkpoint_seconds(recipe, plan),
        )
    )


def _train_in_workers(path: Path, recipe: Recipe, options: TrainOptions, plan: Plan) -> int:
    from windlass.model.formats.disk.atomic import write_atomically
    from windlass.tasks.train.loop.elastic import Machines, run_workers

    folder = run_folder(path, recipe, options.out)
    folder.mkdir(parents=True, exist_ok=True)
    plan_file = folder / (PLAN_FILE if options.node == 0 else f"plan-{options.node}.json")  # nodes may share the folder
    write_atomically(plan_file, encode_plan(plan))
    restarts = DEFAULT_RESTARTS if options.max_restarts is None else options.max_restarts
    arguments = _arguments(path, msgspec.structs.replace(options, plan_file=plan_file))
    least, most = num_nodes(options)
    machines = Machines(least, most, options.rendezvous, options.node, options.address)
    with Phases(not options.as_json) as phases:
        phases.begin(f"starting {options.nproc} processes")
        outcome = run_workers(arguments, options.nproc, restarts, folder, machines)
    if outcome.kind == "failed":
        error = RunFailed(outcome.message or "the run failed")
        error.exit_code = outcome.exit_code or RunFailed.exit_code
        raise error
    return STOPPED if outcome.kind == "stopped" else 0


def _arguments(path: Path, options: TrainOptions) -> list[str]:
    """The same command, for a worker process."""
    arguments = ["-m", "windlass", "train", "run", str(path)]
    arguments += [argument for setting in options.settings for argument in ("--set", setting)]
    values = {"--out": options.out, "--prometheus": options.prometheus, "--plan-file": options.plan_file}
    arguments += [text for flag, value in values.items() if value is not None for text in (flag, str(value))]
    flags = {
        "--resume": options.resume,
        "--continue": options.resume_if_any,
        "--profile": options.profile,
        "--tensorboard": options.tensorboard,
        "--json": options.as_json,
    }
    return arguments + [flag for flag, given in flags.items() if given]
