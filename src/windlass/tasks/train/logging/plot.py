"""Plots a run from its JSONL log: loss, validation loss, learning rate, gradient norm, speed, expert balance."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from windlass.errors import BadInput, MissingExtra
from windlass.tasks.train.logging.jsonl import read_samples

PANELS = (
    ("learning_rate", "learning rate"),
    ("grad_norm", "gradient norm"),
    ("tokens_per_second", "tokens/s"),
    ("expert_balance_cv", "expert balance CV"),
)
SMOOTHING = 0.05


def plot_run(lines: Path, picture: Path, title: str = "") -> Path:
    if find_spec("matplotlib") is None:
        raise MissingExtra("matplotlib", "plot", "plotting a run")
    samples, events = read_samples(lines)
    if not samples:
        raise BadInput(f"{lines} has no steps to plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [panel for panel in PANELS if any(sample.get(panel[0]) is not None for sample in samples)]
    figure = Figure(figsize=(9, 5 + 1.6 * len(panels)), layout="constrained")
    axes = figure.subplots(1 + len(panels), 1, sharex=True, height_ratios=[3, *([1] * len(panels))], squeeze=False)[:, 0]
    _losses(axes[0], samples, events, title)
    for axis, (name, label) in zip(axes[1:], panels, strict=True):
        axis.plot([sample["step"] for sample in samples], [sample.get(name) for sample in samples], linewidth=0.8)
        axis.set_ylabel(label)
    axes[-1].set_xlabel("step")
    FigureCanvasAgg(figure).print_figure(str(picture), dpi=110)
    return picture


def _losses(axis: Any, samples: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]], title: str) -> None:
    steps = [sample["step"] for sample in samples]
    losses = [sample["loss"] for sample in samples]
    axis.plot(steps, losses, linewidth=0.5, alpha=0.4, color="tab:blue")
    axis.plot(steps, _smoothed(losses), linewidth=1.4, color="tab:blue", label="loss")
    measured = [(event["step"], event["loss"]) for event in events if event["event"] == "validation"]
    if measured:
        axis.plot(*zip(*measured, strict=True), "o-", markersize=3, color="tab:orange", label="validation loss")
    for event in events:
        if event["event"] == "rollback":
            axis.axvline(event["step"], color="tab:red", linewidth=0.8, linestyle=":")
    axis.set_ylabel("loss")
    axis.set_title(title)
    axis.legend()


def _smoothed(values: Sequence[float]) -> list[float]:
    found: list[float] = []
    for value in values:
        found.append(found[-1] + SMOOTHING * (value - found[-1]) if found else value)
    return found
