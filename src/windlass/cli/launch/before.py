"""What a job's own command would refuse, found out before it is queued: the models and tasks that it names, layouts, how a batch divides.

Only what this machine can know. In a container, or on machines that are reached by ssh, other files may be there; what devices the nodes
have is not known either.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from windlass.core.recipe.recipe import Recipe
from windlass.errors import DoesNotFit, Impossible
from windlass.tasks.launch.job import Job, Settings

Words = tuple[tuple[str, ...], Mapping[str, Any]]
"""The names of a command (`eval`, `run`) and its parsed options."""


def refuse_before(words: Words, job: Job, settings: Settings) -> None:
    names, options = words
    elsewhere = bool(settings.container) or (settings.scheduler == "ssh" and job.kind != "serve")
    if names == ("eval", "run"):
        _evaluation(options, elsewhere)
    elif names in (("serve",), ("bench",), ("convert",)) and not elsewhere:
        for name in _models(names[0], options):
            _model(name)
    elif names == ("train", "run"):
        _training(options, job, elsewhere)


def _evaluation(options: Mapping[str, Any], elsewhere: bool) -> None:
    from windlass.tasks.evaluate.tasks.catalog import choose_tasks

    tasks = options.get("tasks")
    if not elsewhere or ("/" not in (tasks or "") and ".toml" not in (tasks or "")):
        choose_tasks(tasks, options.get("category"))
    for name in () if elsewhere else options.get("models") or ():
        if not name.endswith(".toml"):
            _model(name)


def _models(command: str, options: Mapping[str, Any]) -> list[str]:
    if command == "convert":
        sources: list[str] = list(options.get("sources") or ())
        return sources if options.get("out_dir") is not None else sources[:-1]
    if command == "bench":
        return [] if options.get("random_weights") else list(options.get("model") or ())
    return [word.partition("=")[2] or word if "/" not in word.partition("=")[0] else word for word in options.get("models") or ()]


def _model(name: str) -> None:
    """A name that is known, or a place where there is a model. Nothing is downloaded."""
    from windlass.open.resolve import find_model, model_files

    if not name.startswith(("http://", "https://")) and find_model(name).path is not None:
        model_files(name, shown=False)


def _training(options: Mapping[str, Any], job: Job, elsewhere: bool) -> None:
    """As the run itself checks and plans: on the recipe's hardware, and on machines of as many devices as there are ranks."""
    recipe = Path(options["recipe"])
    if not recipe.is_file():  # refused before, unless it may be elsewhere
        return
    from windlass.cli.plan.training import plan_recipe
    from windlass.core.recipe.recipe import load_recipe

    loaded = load_recipe(recipe, tuple(options.get("settings") or ()))
    _arrangement(loaded, job)
    if elsewhere and loaded.model.path is not None:
        return
    if _num_devices(loaded) != job.num_nodes * job.ranks_per_node:
        plan_recipe(loaded, str(recipe), on=_stand_in(job))
    if loaded.hardware.on is None:
        return
    plan = plan_recipe(loaded, str(recipe))
    if not plan.fits and not options.get("force") and plan.train is not None:
        short = int(plan.train.get("short_bytes", 0))
        raise DoesNotFit(f"{recipe} does not fit on {plan.hardware}; `windlass plan {recipe}` says what would", short)


def _arrangement(recipe: Recipe, job: Job) -> None:
    from windlass.tasks.train.parallel.degrees import check_arrangement

    try:
        check_arrangement(recipe, job.ranks_per_node, job.num_nodes, job.gpus_per_node or None)
    except Impossible as error:  # its advice is in words of `train run`
        raise Impossible(str(error).replace("--nproc", "--ranks")) from None


def _num_devices(recipe: Recipe) -> int | None:
    """Of the hardware that the recipe names."""
    from windlass.open.hardware import resolve_hardware

    return None if recipe.hardware.on is None else resolve_hardware(recipe.hardware.on).num_devices


def _stand_in(job: Job) -> str:
    """The nodes are not seen from here. Of their devices only the number counts, so they are large, and such as can do everything."""
    return f"{job.num_nodes}x({job.ranks_per_node}xB200)@400Gb" if job.num_nodes > 1 else f"1x({job.ranks_per_node}xB200)"
