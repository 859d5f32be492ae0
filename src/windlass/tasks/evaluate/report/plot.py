"""Accuracy of every task and model as bars with 95 % intervals. Needs matplotlib (extra `plot`)."""

from __future__ import annotations

import io
from importlib.util import find_spec
from typing import Any

from windlass.errors import MissingExtra
from windlass.tasks.evaluate.report.report import Report
from windlass.tasks.evaluate.report.results import Result

COLOURS = ("#3465a4", "#d9822b", "#4e9a06", "#a40000", "#75507b", "#555753")


def plot(report: Report) -> bytes:
    if find_spec("matplotlib") is None:
        raise MissingExtra("matplotlib", "plot", "drawing the report")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(one.model for one in report.results))
    tasks = list(dict.fromkeys(one.task for one in report.results))
    figure = Figure(figsize=(max(5.0, 1.2 * len(tasks) + 1.5), 3.6), dpi=110, layout="constrained")
    axes: Any = figure.add_subplot()
    width = 0.8 / len(models)
    for place, model in enumerate(models):
        found = {one.task: one for one in report.results if one.model == model and one.accuracy is not None}
        at = [tasks.index(task) + (place - (len(models) - 1) / 2) * width for task in found]
        heights = [100 * (one.accuracy or 0.0) for one in found.values()]
        low_high = [[_below(one) for one in found.values()], [_above(one) for one in found.values()]]
        axes.bar(
            at,
            heights,
            width * 0.92,
            label=model,
            color=COLOURS[place % len(COLOURS)],
            yerr=low_high,
            capsize=3,
            ecolor="#333333",
        )
    axes.set_xticks(range(len(tasks)), tasks, rotation=20 if len(tasks) > 4 else 0, ha="right" if len(tasks) > 4 else "center")
    axes.set_ylim(0, 100)
    axes.set_ylabel("accuracy, %, with 95 % interval")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.16), ncols=min(len(models), 3))
    stream = io.BytesIO()
    canvas: Any = FigureCanvasAgg(figure)
    canvas.print_png(stream, metadata={"Software": "windlass"})
    return stream.getvalue()


def _below(one: Result) -> float:
    return max(100 * ((one.accuracy or 0.0) - one.interval[0]), 0.0)


def _above(one: Result) -> float:
    return max(100 * (one.interval[1] - (one.accuracy or 0.0)), 0.0)
