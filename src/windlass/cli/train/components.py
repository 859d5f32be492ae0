"""Builds what a training process needs: trainer with model and data, checkpoints, logger, intervals."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from windlass.cli.train.options import CHECKPOINTS, LOG, TrainingRun
from windlass.core.recipe.recipe import Recipe
from windlass.errors import BadInput

if TYPE_CHECKING:
    from windlass.tasks.train.checkpoint import Checkpoints
    from windlass.tasks.train.data.batches import Batches
    from windlass.tasks.train.logging import MetricsLogger, Sink
    from windlass.tasks.train.loop.loop import Intervals
    from windlass.tasks.train.loop.trainer import Trainer


# --- the trainer


def open_trainer(run: TrainingRun, weights: Path | None) -> Trainer:
    """`weights`: the checkpoint to start from; None: random weights."""
    import torch

    from windlass.model.families import rules
    from windlass.runtime.weights import open_model
    from windlass.tasks.train.build import build_trainer
    from windlass.tasks.train.data.batches import open_batches

    recipe, spec, base = run.recipe, run.spec, run.path.parent
    batches = open_batches(recipe.data, base, vocab_size=spec.vocab_size)
    if batches.vocab_size > spec.vocab_size:
        raise BadInput(
            f"the data has token ids up to {batches.vocab_size - 1:,}, but the model's vocabulary is {spec.vocab_size:,}:"
            " prepare the data with the model's tokenizer"
        )
    opened = open_model(weights) if weights is not None else None
    options: dict[str, Any] = {
        "held_out": open_batches(recipe.data, base, "validation", spec.vocab_size) if recipe.validation.interval_steps else None,
        "opened": opened,
        "device": torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu"),
    }
    try:
        if recipe.run.engine == "deepspeed":
            from windlass.tasks.train.deepspeed.trainer import build_deepspeed

            return build_deepspeed(recipe, spec, rules(spec), batches, base=base, **options)
        return build_trainer(recipe, spec, rules(spec), batches, **options)
    finally:
        if opened is not None:
            opened.store.close()


def note_unchecked(batches: Batches, note: Callable[[str], None]) -> None:
    """Once a run: shards of earlier versions."""
    for folder in batches.unchecked:
        note(
            f"{folder} was prepared without checksums of blocks: it is not checked as it is read; `windlass train data {folder} --verify` checks it"
        )


def initial_weights(recipe: Recipe) -> Path | None:
    """The checkpoint to start from; None: random weights."""
    from windlass.open.resolve import model_files

    if recipe.model.start == "random":
        return None
    if recipe.model.config is not None:
        raise BadInput('model.start = "weights" needs model.name or model.path: model.config has no weights')
    return model_files(recipe.model.path or recipe.model.name or "", shown=True)


def model_config(recipe: Recipe) -> dict[str, Any]:
    """config.json, as it will be exported."""
    if recipe.model.config is not None:
        return recipe.model.config
    from windlass.model.bundled.models import find_bundled
    from windlass.model.families.registry import find, published_config
    from windlass.model.formats.config import read_config
    from windlass.model.formats.hub.hub import fetch_config

    name = recipe.model.path or recipe.model.name or ""
    path = Path(name).expanduser()
    local = path if path.exists() else find_bundled(name)
    if local is not None:
        return read_config(local)
    known = find(name)
    return published_config(known) if known is not None else read_config(fetch_config(name))


def keep_tokenizer(run: TrainingRun, weights: Path | None) -> None:
    """Copies the tokenizer beside the checkpoints, so that they can be exported from there."""
    from windlass.runtime.weights.source import COMPANIONS

    places = [run.path.parent / Path(source.path).expanduser() / "tokenizer" for source in run.recipe.data.sources]
    places += [weights] if weights is not None else []
    found = next((place for place in places if (place / "tokenizer.json").is_file()), None)
    kept = run.folder / "tokenizer"
    if found is None or (kept / "tokenizer.json").is_file():
        return
    kept.mkdir(parents=True, exist_ok=True)
    for name in COMPANIONS:
        if (found / name).is_file():
            shutil.copyfile(found / name, kept / name)


# --- checkpoints


def open_checkpoints(run: TrainingRun, data_fingerprint: str, notify: Callable[[str], None]) -> Checkpoints:
    from windlass.tasks.train.checkpoint import CheckpointIdentity, Checkpoints, spec_digest

    section = run.recipe.checkpoint
    identity = CheckpointIdentity(
        model=run.spec.name,
        spec=spec_digest(run.spec),
        data=data_fingerprint,
        config=model_config(run.recipe),
        recipe=msgspec.to_builtins(run.recipe),
    )
    return Checkpoints(
        run.folder / CHECKPOINTS,
        identity,
        keep_last=section.keep,
        milestone_every=section.milestone_steps or 0,
        local=Path(section.local).expanduser() / run.folder.resolve().name if section.local else None,
        fallback=run.path.parent / Path(section.fallback).expanduser() if section.fallback else None,
        notify=notify,
    )


def intervals(run: TrainingRun) -> Intervals:
    from windlass.tasks.train.loop.loop import Intervals

    section = run.recipe.checkpoint
    minutes = section.interval_minutes
    return Intervals(
        checkpoint_steps=section.interval_steps,
        checkpoint_seconds=60.0 * minutes if minutes is not None else run.checkpoint_seconds,
        milestone_steps=section.milestone_steps,
        validation_steps=run.recipe.validation.interval_steps,
        asynchronous=section.asynchronous,
    )


# --- metrics


def open_logger(run: TrainingRun, trainer: Trainer, rank: int) -> MetricsLogger:
    from windlass.runtime.machine.energy import EnergyCounters
    from windlass.tasks.train.logging import MetricsLogger

    return MetricsLogger(
        _sinks(run) if rank == 0 else [],
        steps=trainer.settings.num_steps,
        flops_per_token=trainer.flops_per_token,
        peak_flops=_peak_flops(run.recipe),
        energy=EnergyCounters() if rank == 0 else None,
    )


def _sinks(run: TrainingRun) -> list[Sink]:
    from windlass.tasks.train.logging.jsonl import JsonLines, PrintedLines
    from windlass.tasks.train.logging.line import LiveLine

    options = run.options
    found: list[Sink] = [PrintedLines() if options.as_json else LiveLine(), JsonLines(run.folder / LOG)]
    if options.tensorboard:
        from windlass.tasks.train.logging.tensorboard import TensorBoard

        found.append(TensorBoard(run.folder / "tensorboard"))
    if options.prometheus is not None:
        from windlass.tasks.train.logging.prometheus import Prometheus

        found.append(Prometheus(options.prometheus))
    return found


def _peak_flops(recipe: Recipe) -> float:
    """Of all devices of the run, as plans count them."""
    import os

    from windlass.runtime.machine.probe import probe
    from windlass.tasks.plan.training.time.rates import peak_flops

    device = probe().devices[0]
    num_devices = 1 if device.kind == "cpu" else int(os.environ.get("WORLD_SIZE", "1"))
    return peak_flops(device, recipe.precision.compute) * num_devices
