"""The loop of a run with a made-up trainer: what is saved when, what a bad step does, and how it stops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from windlass.errors import NOT_SAVED, BadInput
from windlass.tasks.train.checkpoint import CheckpointIdentity, Checkpoints
from windlass.tasks.train.checkpoint.storage import CheckedWriter
from windlass.tasks.train.logging import MetricsLogger
from windlass.tasks.train.loop.guard import Diverged, LossGuard, StopRequest
from windlass.tasks.train.loop.loop import Intervals, NotSaved, TrainingLoop

pytestmark = pytest.mark.cpu

BATCH = 4


class Learner:
    """A weight that remembers, as a number, every sample it has learned from, in order."""

    def __init__(self, steps: int, bad: dict[int, float] | None = None) -> None:
        self.steps, self.bad = steps, bad or {}
        self.progress = SimpleNamespace(step=0, samples=0, tokens=0, skipped=[], best_validation=None, recent=[])
        self.weight = torch.zeros(1, dtype=torch.float64)
        self.learned: list[int] = []
        self.validated: list[int] = []

    @property
    def done(self) -> bool:
        return self.progress.step >= self.steps

    def step(self) -> Any:
        first = self.progress.samples
        self.weight.mul_(1.000001).add_(first + 1)
        self.learned.append(first)
        self.progress.step += 1
        self.progress.samples += BATCH
        self.progress.tokens += BATCH * 10
        loss = self.bad.get(first, 2.0 + 0.01 * (first % 7))
        return SimpleNamespace(
            step=self.progress.step,
            loss=loss,
            grad_norm=1.0,
            lr=0.1,
            tokens=BATCH * 10,
            seconds=0.1,
            first_sample=first,
            parts={},
        )

    def skip(self) -> None:
        first = self.progress.samples
        self.progress.samples += BATCH
        self.progress.skipped.append((first, self.progress.samples))

    def validate(self) -> float:
        self.validated.append(self.progress.step)
        return 3.0 - 0.01 * self.progress.step

    def state(self) -> dict[str, Any]:
        kept = {name: value for name, value in vars(self.progress).items() if name != "skipped"}
        return {"model": {"weight": self.weight}, "progress": kept | {"skipped": [list(pair) for pair in self.progress.skipped]}}

    def load(self, state: dict[str, Any]) -> None:
        self.progress = SimpleNamespace(**state["progress"])
        self.progress.skipped = [tuple(pair) for pair in self.progress.skipped]


class Kept:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.steps: list[int] = []

    def sample(self, sample: Any) -> None:
        self.steps.append(sample.step)

    def event(self, kind: str, values: Any) -> None:
        self.events.append((kind, dict(values)))

    def close(self) -> None: ...

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [values for found, values in self.events if found == kind]


class Rig:
    def __init__(self, folder: Path) -> None:
        self.folder, self.kept = folder, Kept()
        self.fallback: Path | None = None
        self.said: list[str] = []
        self.stop = StopRequest()
        self.open: list[Checkpoints] = []

    def loop(self, learner: Learner, guard: LossGuard | None = None, **intervals: Any) -> TrainingLoop:
        for checkpoints in self.open:
            checkpoints.close()
        identity = CheckpointIdentity(model="made up", spec="1")
        checkpoints = Checkpoints(self.folder, identity, keep_last=2, fallback=self.fallback, notify=self.said.append)
        self.open = [checkpoints]
        watch = MetricsLogger([self.kept], steps=learner.steps)
        intervals = {"checkpoint_steps": 10, **intervals}
        return TrainingLoop(
            learner, checkpoints, guard=guard or LossGuard(), logger=watch, stop=self.stop, intervals=Intervals(**intervals)
        )


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "run")
    yield made
    for checkpoints in made.open:
        checkpoints.close()


def whole(steps: int, without: tuple[int, ...] = ()) -> float:
    learner = Learner(steps)
    while not learner.done:
        if learner.progress.samples in without:
            learner.skip()
        else:
            learner.step()
    return learner.weight.item()


def test_what_is_saved_and_looked_at(rig: Rig) -> None:
    learner = Learner(35)
    ended = rig.loop(learner, validation_steps=15).run()
    assert (ended.kind, ended.step) == ("done", 35)
    assert [values["step"] for values in rig.kept.of("checkpoint")] == [0, 10, 20, 30, 35]
    assert learner.validated == [15, 30] and learner.progress.best_validation == pytest.approx(2.7)
    assert rig.open[0].steps() == [30, 35]
    assert learner.weight.item() == whole(35)


def test_milestones_are_saved_whatever_else_is(rig: Rig) -> None:
    rig.loop(Learner(9), checkpoint_steps=None, milestone_steps=4).run()
    assert [values["step"] for values in rig.kept.of("checkpoint")] == [0, 4, 8, 9]


def test_a_run_that_breaks_far_behind_its_checkpoint_is_given_up(rig: Rig) -> None:
    learner = Learner(60, {first * BATCH: math.nan for first in range(30, 60)})
    with pytest.raises(Diverged):
        rig.loop(learner, LossGuard(window=8, max_rollbacks=3), checkpoint_steps=None).run()


def test_a_clock_saves_too(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(1000))
    monkeypatch.setattr("windlass.tasks.train.loop.loop.time.monotonic", lambda: float(next(now)))
    rig.loop(Learner(9), checkpoint_steps=None, checkpoint_seconds=4.0).run()
    assert len(rig.kept.of("checkpoint")) > 2


@pytest.mark.parametrize("loss", [math.nan, math.inf, 50.0])
def test_a_bad_step_is_undone_and_its_samples_left_out(rig: Rig, loss: float) -> None:
    learner = Learner(60, {34 * BATCH: loss})
    rig.loop(learner).run()
    (event,) = rig.kept.of("rollback")
    assert (event["step"], event["to_step"], event["first_sample"]) == (35, 30, 34 * BATCH)
    assert learner.progress.skipped == [(34 * BATCH, 35 * BATCH)]
    assert learner.weight.item() == whole(60, without=(34 * BATCH,))
    assert learner.progress.step == 60 and 35 in rig.kept.steps


def test_a_bad_first_step(rig: Rig) -> None:
    learner = Learner(5, {0: math.nan})
    rig.loop(learner).run()
    assert learner.weight.item() == whole(5, without=(0,)) and rig.kept.of("rollback")[0]["to_step"] == 0


def test_a_spike_right_after_a_resume_is_known_for_one(rig: Rig) -> None:
    rig.loop(Learner(40)).run()
    again = Learner(60, {41 * BATCH: 50.0})
    loop = rig.loop(again)
    loop.resume()
    loop.run()
    assert [event["first_sample"] for event in rig.kept.of("rollback")] == [41 * BATCH]
    assert again.weight.item() == whole(60, without=(41 * BATCH,))


def test_what_was_left_out_stays_out_after_a_resume(rig: Rig) -> None:
    rig.loop(Learner(40, {34 * BATCH: math.nan})).run()
    again = Learner(50)
    loop = rig.loop(again)
    assert loop.resume() == 40
    loop.run()
    assert again.progress.skipped == [(34 * BATCH, 35 * BATCH)]
    assert again.weight.item() == whole(50, without=(34 * BATCH,))


def test_a_run_that_does_not_recover_gives_up(rig: Rig) -> None:
    learner = Learner(60, {number * BATCH: math.nan for number in range(33, 60)})
    with pytest.raises(Diverged, match="training diverged: the loss is nan"):
        rig.loop(learner, LossGuard(max_rollbacks=4)).run()
    assert len(rig.kept.of("rollback")) == 4


def test_asked_to_stop(rig: Rig) -> None:
    learner = Learner(60)
    loop = rig.loop(learner)
    loop._after_step = lambda: rig.stop.ask("SIGTERM") if learner.progress.step == 17 else None
    ended = loop.run()
    assert (ended.kind, ended.step, ended.why) == ("stopped", 17, "SIGTERM")
    rig.stop = StopRequest()
    again = Learner(60)
    loop = rig.loop(again)
    assert loop.resume() == 17
    loop.run()
    assert again.weight.item() == whole(60)


# --- a disk that is full ----------------------------------------------------------------------------------------------


def fail_writes(monkeypatch: pytest.MonkeyPatch, fails: Callable[[Path], bool]) -> None:
    """Writing into the folders of which `fails` is true ends like on a full disk."""
    real = CheckedWriter.write_data

    def write(self: CheckedWriter, *given: Any) -> Any:
        if fails(self.folder):
            raise OSError(28, "No space left on device")
        return real(self, *given)

    monkeypatch.setattr(CheckedWriter, "write_data", write)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-").removesuffix(".tmp"))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_became_of_every_save_is_logged(rig: Rig, monkeypatch: pytest.MonkeyPatch, asynchronous: bool) -> None:
    fail_writes(monkeypatch, lambda folder: step_of(folder) == 10)
    rig.loop(Learner(20), asynchronous=asynchronous).run()
    assert [values["step"] for values in rig.kept.of("checkpoint")] == [0, 20]
    assert [values["step"] for values in rig.kept.of("checkpoint_failed")] == [10]
    assert rig.said == ["the checkpoint of step 10 could not be saved, training continues: No space left on device"]


@pytest.mark.parametrize(
    ("stopped", "what"), [(False, "training ended after step 30"), (True, r"stopped after step 30 \(SIGTERM\)")]
)
def test_a_last_save_that_fails_is_no_success(rig: Rig, monkeypatch: pytest.MonkeyPatch, stopped: bool, what: str) -> None:
    """Neither done nor to be continued: steps are gone, and the same job would lose them again."""
    fail_writes(monkeypatch, lambda folder: step_of(folder) > 10)
    learner = Learner(60 if stopped else 30)
    loop = rig.loop(learner)
    loop._after_step = lambda: rig.stop.ask("SIGTERM") if stopped and learner.progress.step == 30 else None
    good = rig.folder / "step-00000010"
    with pytest.raises(
        NotSaved, match=rf"^{what}, but the .*No space left on device\): steps 11 to 30 are lost; .* is {good};"
    ) as caught:
        loop.run()
    assert caught.value.exit_code == NOT_SAVED and "\n" not in str(caught.value)
    assert rig.kept.of("stop") == [] and [values["step"] for values in rig.kept.of("checkpoint_failed")][-1] == 30


def test_a_disk_that_is_full_from_the_start(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_writes(monkeypatch, lambda folder: True)
    learner = Learner(5)
    with pytest.raises(NotSaved, match=r"training was to begin, but .* no step is lost, and there is no good checkpoint"):
        rig.loop(learner).run()
    assert learner.learned == []


def test_a_save_that_fails_is_made_elsewhere(rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A resume finds the newest of both folders, and what is old is removed from both."""
    rig.fallback = tmp_path / "fallback"
    fail_writes(monkeypatch, lambda folder: folder.parent == rig.folder and 10 < step_of(folder) < 40)
    assert rig.loop(Learner(30)).run().kind == "done"
    assert rig.kept.of("checkpoint_failed") == [] and rig.open[0].latest() == 30
    assert rig.said[0].startswith(
        f"the checkpoint of step 20 is in {rig.fallback}, since it could not be saved in {rig.folder}: No space"
    )
    again = Learner(50)
    loop = rig.loop(again)
    assert loop.resume() == 30
    loop.run()
    assert again.weight.item() == whole(50)
    assert rig.open[0].steps() == [40, 50] and list(rig.fallback.glob("step-*")) == []


def test_two_full_disks(rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rig.fallback = tmp_path / "fallback"
    fail_writes(monkeypatch, lambda folder: step_of(folder) > 10)
    with pytest.raises(
        NotSaved, match=rf"{rig.folder}: No space left on device; {rig.fallback}: No space left on device\): steps 11"
    ):
        rig.loop(Learner(20)).run()


def test_nothing_to_resume(rig: Rig) -> None:
    with pytest.raises(BadInput, match="has no checkpoint to resume from"):
        rig.loop(Learner(5)).resume()
