"""One process of a training run: opens what the recipe names, wires trainer, checkpoints, guard and watch together, and runs."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from windlass.cli.open.resolve import Resolved
from windlass.core.recipe.recipe import Recipe
from windlass.errors import BadInput, Error

if TYPE_CHECKING:
    from windlass.train.logging import Sink, Watch
    from windlass.train.loop.loop import Ended

TIMEOUT_MINUTES = 10
"""Ranks that hear nothing of the others for so long end, and are started again."""
LOG, PICTURE, PROFILE, CHECKPOINTS = "log.jsonl", "run.png", "profile", "checkpoints"


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    resume: bool
    profile: bool
    prometheus: int | None
    tensorboard: bool
    as_json: bool
    checkpoint_seconds: float | None


class Model(msgspec.Struct, frozen=True):
    resolved: Resolved
    config: dict[str, Any]
    weights: Path | None
    """Where training goes on from; None: from chance."""


def train(path: Path, recipe: Recipe, folder: Path, wanted: Wanted) -> int:
    """0 done; 75 stopped on request, and saved. Under torchrun, whose agent restarts what ends otherwise, 0 then too."""
    from windlass.train.loop.elastic import Outcome, end_with_agent, read_outcome, restarted, under_agent, write_outcome
    from windlass.train.loop.guard import STOPPED

    with _processes() as rank:
        if not under_agent():
            ended = _run(path, recipe, folder, wanted, rank)
            return STOPPED if ended.kind == "stopped" else 0
        end_with_agent()
        before = read_outcome(folder) if restarted() else None  # an earlier run's says nothing of this one
        if before is not None and before.kind == "failed":  # started again after what will not mend itself
            return before.exit_code
        try:
            ended = _run(path, recipe, folder, wanted, rank)
        except Error as error:
            if rank == 0:
                write_outcome(folder, Outcome("failed", message=str(error), exit_code=error.exit_code))
            return error.exit_code
        if rank == 0:
            write_outcome(folder, Outcome(ended.kind, ended.step))
        return 0


@contextmanager
def _processes() -> Generator[int]:
    """The group of all ranks, where torchrun started several; else nothing."""
    import os
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield 0
        return
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=TIMEOUT_MINUTES))
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def _run(path: Path, recipe: Recipe, folder: Path, wanted: Wanted, rank: int) -> Ended:
    from windlass.train.checkpoint import Checkpoints, Identity, spec_digest
    from windlass.train.logging.profile import RunProfile
    from windlass.train.loop.elastic import STOP, restarted, under_agent
    from windlass.train.loop.guard import Guard, StopRequest
    from windlass.train.loop.loop import Loop

    model = _model(recipe, path)
    trainer = _trainer(recipe, path, model)
    watch = _watch(folder, recipe, wanted, trainer, rank)
    local = recipe.checkpoint.local
    identity = Identity(
        model=model.resolved.spec.name,
        spec=spec_digest(model.resolved.spec),
        data=trainer.batches.fingerprint,
        config=model.config,
        recipe=msgspec.to_builtins(recipe),
    )
    with StopRequest() as stop:
        checkpoints = Checkpoints(
            folder / CHECKPOINTS,
            identity,
            keep_last=recipe.checkpoint.keep,
            milestone_every=recipe.checkpoint.milestone_steps or 0,
            local=Path(local).expanduser() / folder.resolve().name if local else None,
            notify=watch.note,
        )
        try:
            if under_agent() and (folder / STOP).exists():
                stop.ask("asked before it began")
            profile = RunProfile(folder / PROFILE) if wanted.profile and rank == 0 else None
            section = recipe.guard
            loop = Loop(
                trainer,
                checkpoints,
                guard=Guard(window=section.window, threshold=section.spike, max_rollbacks=section.rollbacks),
                watch=watch,
                stop=stop,
                intervals=_intervals(recipe, wanted),
                after_step=profile.step if profile is not None else lambda: None,
            )
            _begin(loop, checkpoints, wanted.resume or restarted(), folder, model, recipe, path, rank)
            ended = loop.run()
            if profile is not None:
                profile.close()
        finally:
            checkpoints.close()
            watch.close()
    if rank == 0:
        _draw(folder, model.resolved.spec.name)
    return ended


def _begin(loop: Any, checkpoints: Any, resume: bool, folder: Path, model: Model, recipe: Recipe, path: Path, rank: int) -> None:
    """From the last checkpoint; or from the start, in a folder that has none."""
    from windlass.train.loop.elastic import restarted

    if resume and not (restarted() and checkpoints.latest() is None):
        step = loop.resume()
        loop.watch.note(f"goes on after step {step:,}")
    elif checkpoints.latest() is not None and not restarted():
        raise BadInput(f"{checkpoints.folder} has checkpoints already; go on with --resume, or choose another folder with --out")
    if rank == 0:
        _keep_tokenizer(folder, model, recipe, path)


# --- the model


def _model(recipe: Recipe, path: Path) -> Model:
    from windlass.cli.plan.training import recipe_model

    resolved, config = recipe_model(recipe, str(path)), _config(recipe)
    if recipe.model.start == "random":
        return Model(resolved, config, None)
    if recipe.model.config is not None:
        raise BadInput('model.start = "weights" needs model.name or model.path: a config alone has none')
    return Model(resolved, config, _weights(recipe))


def _config(recipe: Recipe) -> dict[str, Any]:
    """config.json, as it will be exported."""
    if recipe.model.config is not None:
        return recipe.model.config
    from windlass.families.registry import find, published_config
    from windlass.formats.config import read_config
    from windlass.formats.hub.hub import fetch_config

    word = recipe.model.path or recipe.model.name or ""
    here = Path(word).expanduser()
    if here.exists():
        return read_config(here)
    known = find(word)
    return published_config(known) if known is not None else read_config(fetch_config(word))


def _weights(recipe: Recipe) -> Path:
    from windlass.cli.open.locate import locate

    return locate(recipe.model.path or recipe.model.name or "", shown=True)


def _trainer(recipe: Recipe, path: Path, model: Model) -> Any:
    import torch

    from windlass.train.build import build_trainer
    from windlass.train.data.batches import open_batches
    from windlass.weights import open_model

    base = path.parent
    batches = open_batches(recipe.data, base)
    held_out = open_batches(recipe.data, base, "validation") if recipe.validation.interval_steps else None
    spec = model.resolved.spec
    if batches.vocab_size > spec.vocab_size:
        raise BadInput(
            f"the data has tokens up to {batches.vocab_size - 1:,}, and the model only {spec.vocab_size:,}: another tokenizer?"
        )
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    opened = open_model(model.weights) if model.weights is not None else None
    given: dict[str, Any] = {"held_out": held_out, "opened": opened, "device": device}
    try:
        if recipe.run.engine == "deepspeed":
            from windlass.train.deepspeed.trainer import build_deepspeed

            return build_deepspeed(recipe, spec, model.resolved.rules, batches, base=base, **given)
        return build_trainer(recipe, spec, model.resolved.rules, batches, **given)
    finally:
        if opened is not None:
            opened.store.close()


def _keep_tokenizer(folder: Path, model: Model, recipe: Recipe, path: Path) -> None:
    """A copy beside the checkpoints, so that they can be exported whole wherever they are taken."""
    from windlass.weights.source import COMPANIONS

    places = [path.parent / Path(source.path).expanduser() / "tokenizer" for source in recipe.data.sources]
    places += [model.weights] if model.weights is not None else []
    found = next((place for place in places if (place / "tokenizer.json").is_file()), None)
    kept = folder / "tokenizer"
    if found is None or (kept / "tokenizer.json").is_file():
        return
    kept.mkdir(parents=True, exist_ok=True)
    for name in COMPANIONS:
        if (found / name).is_file():
            shutil.copyfile(found / name, kept / name)


# --- what is shown and when


def _intervals(recipe: Recipe, wanted: Wanted) -> Any:
    from windlass.train.loop.loop import Intervals

    minutes = recipe.checkpoint.interval_minutes
    by_clock = 60.0 * minutes if minutes is not None else None
    if minutes is None and recipe.checkpoint.interval_steps is None:
        by_clock = wanted.checkpoint_seconds
    return Intervals(
        checkpoint_steps=recipe.checkpoint.interval_steps,
        checkpoint_seconds=by_clock,
        milestone_steps=recipe.checkpoint.milestone_steps,
        validation_steps=recipe.validation.interval_steps,
        asynchronous=recipe.checkpoint.asynchronous,
    )


def _watch(folder: Path, recipe: Recipe, wanted: Wanted, trainer: Any, rank: int) -> Watch:
    from windlass.train.logging import Watch

    sinks = _sinks(folder, wanted) if rank == 0 else []
    return Watch(sinks, steps=trainer.settings.num_steps, flops_per_token=trainer.flops_per_token, peak_flops=_peak_flops(recipe))


def _sinks(folder: Path, wanted: Wanted) -> list[Sink]:
    from windlass.train.logging.jsonl import JsonLines, PrintedLines
    from windlass.train.logging.line import Line

    found: list[Sink] = [PrintedLines() if wanted.as_json else Line(), JsonLines(folder / LOG)]
    if wanted.tensorboard:
        from windlass.train.logging.tensorboard import TensorBoard

        found.append(TensorBoard(folder / "tensorboard"))
    if wanted.prometheus is not None:
        from windlass.train.logging.prometheus import Prometheus

        found.append(Prometheus(wanted.prometheus))
    return found


def _peak_flops(recipe: Recipe) -> float:
    """Of the devices that the run has, all together, as plans count them."""
    import os

    from windlass.machine.probe import probe
    from windlass.plan.training.time.rates import peak_flops

    device = probe().devices[0]
    num_devices = 1 if device.kind == "cpu" else int(os.environ.get("WORLD_SIZE", "1"))
    return peak_flops(device, recipe.precision.compute) * num_devices


def _draw(folder: Path, name: str) -> None:
    """Where matplotlib is; a picture is never worth a failed run."""
    from importlib.util import find_spec

    from windlass.train.logging.plot import plot_run

    if find_spec("matplotlib") is None:
        return
    try:
        plot_run(folder / LOG, folder / PICTURE, name)
    except (Error, OSError) as error:
        print(f"windlass: the run was not drawn: {error}", file=sys.stderr)
