"""The inputs of a training process: the command's options and the decisions of the plan."""

from __future__ import annotations

from pathlib import Path

import msgspec

from windlass.core.model import ModelSpec
from windlass.core.recipe.recipe import Recipe

LOG, PLOT, PROFILE, CHECKPOINTS = "log.jsonl", "run.png", "profile", "checkpoints"
"""In the run's folder."""


class TrainOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `windlass train run`."""

    resume: bool = False
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
