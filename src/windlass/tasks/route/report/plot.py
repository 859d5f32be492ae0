"""Quality against cost: each model, the router along its path, random, length and the oracle. Needs matplotlib (extra `plot`)."""

from __future__ import annotations

import io
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from windlass.errors import MissingExtra


def pareto_plot(report: Mapping[str, Any], format: str = "png") -> bytes:
    if find_spec("matplotlib") is None:
        raise MissingExtra("matplotlib", "plot", "drawing quality against cost")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), dpi=120, layout="constrained")
    axes: Any = figure.add_subplot()
    path = sorted(report["path"], key=lambda point: point["cost"])
    axes.plot([p["cost"] for p in path], [100 * p["score"] for p in path], color="#3465a4", label="router, by tolerance")
    models = report["models"]
    axes.plot([m["cost"] for m in models], [100 * m["score"] for m in models], "--", color="#aaaaaa", label="random mix")
    for model in models:
        _point(axes, model, model["name"], "s", "#555753")
    _point(axes, report["router"], f"router, floor {report['floor']['asked']:g}", "o", "#3465a4")
    _point(axes, report["baselines"]["length"], "by length", "^", "#d9822b")
    _point(axes, report["baselines"]["oracle"], "oracle", "*", "#4e9a06")
    axes.set_xlabel(f"cost ({report['cost_unit']})", fontsize=8)
    axes.set_ylabel("score, %, with 95 % interval")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7)
    stream = io.BytesIO()
    if format == "svg":
        canvas: Any = FigureCanvasSVG(figure)
        canvas.print_svg(stream, metadata={"Date": None})
    else:
        canvas = FigureCanvasAgg(figure)
        canvas.print_png(stream, metadata={"Software": "windlass"})
    return stream.getvalue()


def _point(axes: Any, found: Mapping[str, Any], label: str, marker: str, colour: str) -> None:
    low, high = found["score_interval"]
    score = found["score"]
    error = [[100 * max(score - low, 0)], [100 * max(high - score, 0)]]
    axes.errorbar([found["cost"]], [100 * score], yerr=error, fmt=marker, color=colour, capsize=3, markersize=7, label=label)
