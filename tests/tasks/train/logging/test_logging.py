"""What a run shows of itself: the numbers, and where they go."""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from waiting import HUNG_SECONDS
from windlass.errors import BadInput, MissingExtra
from windlass.tasks.train.logging import MetricsLogger, StepMetrics
from windlass.tasks.train.logging.fan_out import balance_cv
from windlass.tasks.train.logging.jsonl import JsonLines, read_lines, read_samples
from windlass.tasks.train.logging.line import LiveLine, metrics_text

pytestmark = pytest.mark.pure


@dataclass
class Report:
    loss: float = 2.0
    grad_norm: float = 0.5
    lr: float = 1e-3
    tokens: int = 1000
    seconds: float = 0.5
    expert_load: Any = None
    parts: dict[str, float] = field(default_factory=dict)


class Kept:
    def __init__(self) -> None:
        self.samples: list[StepMetrics] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.closed = False

    def sample(self, sample: StepMetrics) -> None:
        self.samples.append(sample)

    def event(self, kind: str, values: Any) -> None:
        self.events.append((kind, dict(values)))

    def close(self) -> None:
        self.closed = True


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_a_step_becomes_a_sample() -> None:
    kept = Kept()
    watch = MetricsLogger([kept], steps=10, flops_per_token=6e6, peak_flops=24e9)
    watch.validation(3, 2.5)
    watch.step(4, Report(expert_load=[[1, 1], [2, 0]], parts={"mtp": 0.3}), tokens=4000)
    (sample,) = kept.samples
    assert sample.tokens_per_second == 2000 and sample.mfu == pytest.approx(0.5)
    assert sample.validation_loss == 2.5 and sample.seconds_left == pytest.approx(3.0)
    assert sample.expert_balance_cv == pytest.approx(0.5) and sample.parts == {"mtp": 0.3}
    watch.close()
    assert kept.closed


@pytest.mark.parametrize(
    ("load", "expected"),
    [(None, None), ([[5, 5, 5, 5]], 0.0), ([[4, 0, 0, 0]], 3**0.5), ([[0, 0]], None), ([[2, 0], [1, 1]], 0.5)],
)
def test_balance(load: Any, expected: float | None) -> None:
    assert balance_cv(load) == (expected if expected is None else pytest.approx(expected))


def test_the_line_has_everything() -> None:
    watch = MetricsLogger(steps=10, flops_per_token=6e6, peak_flops=24e9)
    watch.validation(3, 2.5)
    text = metrics_text(watch.step(4, Report(expert_load=[[2, 0]]), tokens=4000))
    for part in (
        "step 4/10", "loss 2.0000", "validation 2.5000", "2,000 tokens/s", "MFU 50.0%", "grad norm 0.5", "lr 1.00e-03", "balance CV 1.00",
        "4.00k tokens", "3.0 s left",
    ):  # fmt: skip
        assert part in text, text


def test_the_line_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    """Where nobody looks there are a few lines, no control codes; what happened is told."""
    watch = MetricsLogger([LiveLine(every_seconds=1000.0)], steps=10)
    for step in range(1, 6):
        watch.step(step, Report(), tokens=step * 1000)
    watch.event("rollback", step=5, to_step=3, why="the loss is nan")
    watch.note("the checkpoint of step 2 could not be saved")
    watch.close()
    printed = capsys.readouterr()
    assert printed.out == "" and "\x1b" not in printed.err
    lines = printed.err.splitlines()
    assert [line.split(" · ")[0] for line in lines] == [
        "step 1/10",
        "rolled back to step 3, skipping the samples of step 5: the loss is nan",
        "the checkpoint of step 2 could not be saved",
        "step 5/10",
    ]


# --- files ------------------------------------------------------------------------------------------------------------


def log(path: Path, *steps: int) -> None:
    watch = MetricsLogger([JsonLines(path)], steps=10)
    for step in steps:
        watch.step(step, Report(loss=10.0 - step), tokens=step * 1000)
    watch.close()


def test_lines_go_on_after_a_resume_and_what_was_undone_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log(path, 1, 2, 3, 4)
    with path.open("ab") as stream:
        stream.write(b'{"step": 5, "lo')  # killed while writing
    watch = MetricsLogger([JsonLines(path)])
    watch.event("rollback", step=4, to_step=2, why="a spike")
    watch.close()
    log(path, 3)
    samples, events = read_samples(path)
    assert [sample["step"] for sample in samples] == [1, 2, 3]
    assert [event["event"] for event in events] == ["rollback"]


def test_a_full_disk_costs_lines_only() -> None:
    lines = JsonLines(Path("/dev/full"))
    watch = MetricsLogger([lines])
    watch.step(1, Report(), tokens=1)
    assert lines.num_lost == 1
    watch.close()


def test_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from windlass.tasks.train.logging.plot import plot_run

    log(tmp_path / "log.jsonl", *range(1, 30))
    picture = plot_run(tmp_path / "log.jsonl", tmp_path / "run.png", "a run")
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(BadInput, match="has no steps to plot"):
        plot_run(tmp_path / "empty.jsonl", tmp_path / "no.png")


def test_tensorboard_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from windlass.tasks.train.logging.tensorboard import TensorBoard

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtra, match="tensorboard"):
        TensorBoard(tmp_path)


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from windlass.tasks.train.logging.tensorboard import TensorBoard

    watch = MetricsLogger([TensorBoard(tmp_path)], steps=10)
    watch.step(1, Report(loss=2.5, parts={"mtp": 1.0}), tokens=5)
    watch.validation(1, 2.25)
    watch.note("something")
    watch.close()
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert [scalar.value for scalar in found.Scalars("training/loss")] == [2.5]
    assert [scalar.value for scalar in found.Scalars("validation/loss")] == [2.25]
    assert "training/loss_mtp" in found.Tags()["scalars"]


# --- Prometheus -------------------------------------------------------------------------------------------------------


def test_prometheus() -> None:
    pytest.importorskip("prometheus_client")
    from windlass.tasks.train.logging.prometheus import Prometheus

    sink = Prometheus(0)
    watch = MetricsLogger([sink], steps=10)
    try:
        watch.step(1, Report(expert_load=[[2, 0]]), tokens=1000)
        watch.step(2, Report(loss=1.5), tokens=2000)
        watch.validation(2, 1.75)
        watch.event("rollback", step=2, to_step=1, why="")
        text = urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=HUNG_SECONDS).read().decode()
    finally:
        watch.close()
    for line in (
        "windlass_training_loss 1.5", "windlass_training_learning_rate 0.001", "windlass_training_tokens_per_second 2000.0",
        "windlass_training_steps_total 2.0", "windlass_training_tokens_total 2000.0", "windlass_training_expert_balance_cv 1.0",
        "windlass_training_validation_loss 1.75", 'windlass_training_events_total{kind="rollback"} 1.0',
    ):  # fmt: skip
        assert line in text.splitlines(), text


def test_a_loss_that_is_rolled_back_is_counted_and_checkpoints_have_their_time() -> None:
    pytest.importorskip("prometheus_client")
    from windlass.tasks.train.logging.prometheus import Prometheus

    sink = Prometheus(0)
    watch = MetricsLogger([sink], steps=10)
    try:
        watch.event("rollback", step=2, to_step=1, why="the loss is nan", loss=float("nan"))
        watch.event("checkpoint", step=2)
        text = urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=HUNG_SECONDS).read().decode()
    finally:
        watch.close()
    lines = text.splitlines()
    assert "windlass_training_loss NaN" in lines and 'windlass_training_events_total{kind="not_finite"} 1.0' in lines
    assert (
        'windlass_training_events_total{kind="checkpoint_failed"} 0.0' in lines
    )  # there from the start: the first one is an increase
    saved = next(
        float(line.split()[1]) for line in lines if line.startswith("windlass_training_last_checkpoint_timestamp_seconds ")
    )
    assert abs(saved - time.time()) < HUNG_SECONDS


def test_energy_of_a_step(tmp_path: Path) -> None:
    class Counters:
        source = "nvml"

        def joules(self) -> float:
            return 1234.5

    watch = MetricsLogger([JsonLines(tmp_path / "log.jsonl")], energy=Counters())  # type: ignore[arg-type]
    watch.step(1, Report(), tokens=10)
    watch.close()
    (line,) = read_lines(tmp_path / "log.jsonl")
    assert line["energy_joules"] == 1234.5 and line["energy_source"] == "nvml"


def test_a_port_that_is_taken_is_one_line() -> None:
    pytest.importorskip("prometheus_client")
    from windlass.tasks.train.logging.prometheus import Prometheus

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(BadInput, match="cannot open the port"):
            Prometheus(taken.getsockname()[1])


def test_printed_lines_are_json(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    from windlass.tasks.train.logging.jsonl import PrintedLines

    watch = MetricsLogger([PrintedLines()])
    watch.step(1, Report(), tokens=5)
    watch.close()
    assert json.loads(capsysbinary.readouterr().out)["tokens"] == 5


def test_prometheus_shows_the_times_of_ranks() -> None:
    """Counters that grow by what came since; under the names of a split model, so that the same rule names the straggler."""
    pytest.importorskip("prometheus_client")
    import urllib.request

    from windlass.tasks.train.logging.prometheus import Prometheus
    from windlass.tasks.train.progress import RankTimes

    sink = Prometheus(0)
    try:
        for steps in (10, 20):
            sink.event(
                "ranks", {"ranks": tuple(RankTimes(rank, "h", steps, 1.0 * steps, {"sums": 0.1 * steps}) for rank in (0, 1))}
            )
        text = urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=60).read().decode()
    finally:
        sink.close()
    assert 'windlass_rank_step_seconds_total{rank="1",worker="h"} 20.0' in text
    assert 'windlass_rank_collective_seconds_total{collective="sums",group="",rank="0",worker="h"} 2.0' in text
