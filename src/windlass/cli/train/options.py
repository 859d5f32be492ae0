"""The inputs of a training process: the command's options and the decisions of the plan."""

from __future__ import annotations

from pathlib import Path

import msgspec

from windlass.core.model import ModelSpec
from windlass.core.recipe.recipe import Recipe
from windlass.errors import BadInput

LOG, PLOT, PROFILE, CHECKPOINTS = "log.jsonl", "run.png", "profile", "checkpoints"
"""In the run's folder."""


class TrainOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `windlass train run`."""

    resume: bool = False
    resume_if_any: bool = False
    nodes: str = "1"
    """N, or MIN:MAX."""
    rendezvous: str = ""
    node: int = 0
    address: str = ""
    settings: tuple[str, ...] = ()
    nproc: int = 1
    max_restarts: int | None = None
    out: Path | None = None
    plan_only: bool = False
    plan_file: Path | None = None
    force: bool = False
    profile: bool = False
    prometheus: int | None = None
    tensorboard: bool = False
    as_json: bool = False


def num_nodes(options: TrainOptions) -> tuple[int, int]:
    """The fewest and the most machines."""
    least, _, most = options.nodes.partition(":")
    words = [least, most or least]
    if not all(word.isdecimal() and word.isascii() for word in words) or not 0 < int(words[0]) <= int(words[1]):
        raise BadInput(f"--nodes {options.nodes!r}: write a number of machines, or MIN:MAX")
    if int(words[1]) > 1 and not options.rendezvous:
        raise BadInput("--nodes needs --rendezvous HOST:PORT, where the machines meet; `windlass launch` sets both")
    return int(words[0]), int(words[1])


class TrainingRun(msgspec.Struct, frozen=True, kw_only=True):
    """What one process needs to run a recipe, with the decisions of its plan."""

    path: Path
    """Of the recipe."""
    recipe: Recipe
    folder: Path
    spec: ModelSpec
    options: TrainOptions
    checkpoint_seconds: float | None
    """Planned interval between checkpoints; None: as the recipe says."""
