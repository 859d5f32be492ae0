"""One process of a training run: joins the process group, builds trainer, checkpoints, guard and logger, and runs the loop."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.cli.train.options import CHECKPOINTS, LOG, PLOT, PROFILE, TrainingRun
from windlass.cli.train.phases import BUILDING, LOADING, RESUMING, Phases, first_step
from windlass.errors import STOPPED, BadInput, Error
from windlass.foreign import MAX_MESSAGE, shown
from windlass.runtime.machine.torch_import import importing

if TYPE_CHECKING:
    from windlass.tasks.train.checkpoint import Checkpoints
    from windlass.tasks.train.logging import MetricsLogger
    from windlass.tasks.train.loop.guard import StopRequest
    from windlass.tasks.train.loop.loop import RunResult, TrainingLoop
    from windlass.tasks.train.loop.trainer import Trainer

TIMEOUT_MINUTES = 10
"""Ranks whose collectives wait longer than this exit, and are restarted by the agent."""


def train(run: TrainingRun) -> int:
    """Exit code: 0 done; 75 stopped and saved. Under torchrun, whose agent restarts workers that fail, 0 in both cases."""
    from windlass.tasks.train.loop.elastic import under_agent

    with Phases(_is_first() and not run.options.as_json) as phases:
        phases.begin(LOADING)
        return _train_under_agent(run, phases) if under_agent() else _train(run, phases)


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _train(run: TrainingRun, phases: Phases) -> int:
    from windlass.tasks.train.loop.guard import StoppedBeforeStart, StopRequest
    from windlass.tasks.train.loop.lost import plain_errors

    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1  # other ranks would wait for one that ends at once
    with StopRequest(ends_at_once=alone) as stop:
        try:
            with _process_group() as rank, plain_errors(run.folder / CHECKPOINTS):
                return STOPPED if _run(run, rank, stop, phases).kind == "stopped" else 0
        except StoppedBeforeStart as asked:
            print(f"windlass: stopped before the first step ({asked.reason}); nothing is lost, start it again", file=sys.stderr)
            return STOPPED


def _train_under_agent(run: TrainingRun, phases: Phases) -> int:
    """How it ended is in the run's folder."""
    from windlass.tasks.train.loop.elastic import (
        RunOutcome,
        begin_outcome,
        read_outcome,
        stop_when_agent_dies,
        was_restarted,
        write_outcome,
    )
    from windlass.tasks.train.loop.guard import StopRequest
    from windlass.tasks.train.loop.lost import RankLost, plain_errors

    before = read_outcome(run.folder) if was_restarted() else None  # else it is of an earlier run
    if before is not None and before.kind == "failed":  # restarted after an error that a restart does not fix
        return before.exit_code
    stop_when_agent_dies()
    if _is_first():
        begin_outcome(run.folder)
    with StopRequest() as stop, _process_group() as rank:
        try:
            with plain_errors(run.folder / CHECKPOINTS):
                result = _run(run, rank, stop, phases)
        except RankLost as error:  # the agent starts all of them again
            print(f"windlass: rank {rank}: {error}", file=sys.stderr)
            return error.exit_code
        except Error as error:
            write_outcome(run.folder, RunOutcome("failed", message=str(error), exit_code=error.exit_code))
            return error.exit_code
        if rank == 0:
            write_outcome(run.folder, RunOutcome(result.kind, result.step))
        return 0


@contextmanager
def _process_group() -> Generator[int]:
    """Joins the group of all ranks, if torchrun started several. Yields the rank."""
    from datetime import timedelta
    from importlib import import_module

    with importing():
        import torch
        import torch.distributed as dist

        import_module("windlass.tasks.train.build")  # most of what is imported later: DTensor, pipelining, dynamo

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


def _run(run: TrainingRun, rank: int, stop: StopRequest, phases: Phases) -> RunResult:
    from windlass.cli.train.components import (
        initial_weights,
        keep_tokenizer,
        note_unchecked,
        open_checkpoints,
        open_logger,
        open_trainer,
    )
    from windlass.tasks.train.loop.elastic import STOP, under_agent

    phases.begin(BUILDING)
    weights = initial_weights(run.recipe)
    trainer = open_trainer(run, weights)
    logger = open_logger(run, trainer, rank)
    note_unchecked(trainer.batches, logger.note)
    stop.begin()
    checkpoints = open_checkpoints(run, trainer.batches.fingerprint, logger.note)
    try:
        if under_agent() and (run.folder / STOP).exists():
            stop.ask("stop requested before the start")
        loop, close_profile = _loop(run, trainer, checkpoints, logger, stop, rank, phases)
        phases.begin(RESUMING)
        _begin(loop, checkpoints, run)
        if rank == 0:
            keep_tokenizer(run, weights)
        result = loop.run()
        close_profile()
    finally:
        phases.end()
        checkpoints.close()
        logger.close()
    if rank == 0:
        _plot(run.folder, run.spec.name)
    return result


def _loop(
    run: TrainingRun,
    trainer: Trainer,
    checkpoints: Checkpoints,
    logger: MetricsLogger,
    stop: StopRequest,
    rank: int,
    phases: Phases,
) -> tuple[TrainingLoop, Callable[[], None]]:
    """The loop, and what ends its profile."""
    from windlass.cli.train.components import intervals
    from windlass.tasks.train.logging.profile import RunProfile
    from windlass.tasks.train.loop.guard import LossGuard
    from windlass.tasks.train.loop.loop import TrainingLoop

    profile = RunProfile(run.folder / PROFILE) if run.options.profile and rank == 0 else None
    section = run.recipe.guard
    texts = {"save": "saving a checkpoint", "first step": first_step(run.recipe, trainer.device.type == "cuda")}
    loop = TrainingLoop(
        trainer,
        checkpoints,
        guard=LossGuard(window=section.window, threshold=section.spike, max_rollbacks=section.rollbacks),
        logger=logger,
        stop=stop,
        intervals=intervals(run),
        after_step=profile.step if profile is not None else lambda: None,
        announce=lambda phase: phases.end() if phase is None else phases.begin(texts[phase]),
    )
    return loop, profile.close if profile is not None else lambda: None


def _begin(loop: TrainingLoop, checkpoints: Checkpoints, run: TrainingRun) -> None:
    """Resumes from the last checkpoint, or starts in a folder without any."""
    from windlass.tasks.train.loop.elastic import was_restarted

    restarted, if_any = was_restarted(), run.options.resume_if_any
    if (run.options.resume or restarted or if_any) and not ((restarted or if_any) and checkpoints.latest() is None):
        step = loop.resume()
        loop.logger.note(f"resumed after step {step:,}")
    elif (found := checkpoints.latest()) is not None and not restarted:
        raise BadInput(
            f"{checkpoints.path(found).parent} already has checkpoints; continue with --resume, or choose another folder with --out"
        )


def _plot(folder: Path, name: str) -> None:
    """If matplotlib is installed; a failed plot does not fail the run."""
    from importlib.util import find_spec

    from windlass.tasks.train.logging.plot import plot_run

    if find_spec("matplotlib") is None:
        return
    try:
        plot_run(folder / LOG, folder / PLOT, name)
    except (Error, OSError) as error:
        print(f"windlass: the run could not be plotted: {shown(error, MAX_MESSAGE)}", file=sys.stderr)
