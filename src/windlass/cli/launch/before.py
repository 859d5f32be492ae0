"""What a job's own command would refuse, found out before it is queued: the models and tasks that it names, and how a batch divides.

Only what this machine can know. In a container, or on machines that are reached by ssh, other files may be there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from windlass.errors import DoesNotFit
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
        _training(options, job)


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


def _training(options: Mapping[str, Any], job: Job) -> None:
    """As the run itself plans: on the recipe's hardware, else on machines of as many devices as there are ranks."""
    recipe = Path(options["recipe"])
    if not recipe.is_file():  # refused before, unless it may be elsewhere
        return
    from windlass.cli.plan.training import plan_recipe
    from windlass.core.recipe.recipe import load_recipe

    loaded = load_recipe(recipe, tuple(options.get("settings") or ()))
    plan = plan_recipe(loaded, str(recipe), on=None if loaded.hardware.on else _stand_in(job))
    if loaded.hardware.on and not plan.fits and not options.get("force") and plan.train is not None:
        short = int(plan.train.get("short_bytes", 0))
        raise DoesNotFit(f"{recipe} does not fit on {plan.hardware}; `windlass plan {recipe}` says what would", short)


def _stand_in(job: Job) -> str:
    """The nodes are not seen from here; of their devices only the number counts, so they are large."""
    device = "cpu:8,ram=4TB" if not job.gpus_per_node and job.ranks_per_node == 1 else f"{job.ranks_per_node}xB200"
    return f"{job.num_nodes}x({device})@400Gb" if job.num_nodes > 1 else device if device.startswith("cpu") else f"1x({device})"
