"""Memory per device as stacked bars; with --explain, the parts of a decode step."""
# pyright: basic
# matplotlib's own types are partial.

from __future__ import annotations

from pathlib import Path
from typing import Any

from windlass.core.plan import Plan
from windlass.errors import BadInput, MissingExtra
from windlass.units import GIB

PARTS = (("weights", "#4c78a8"), ("kv", "#f58518"), ("activation", "#54a24b"), ("overhead", "#b9b9b9"))
MOST_BARS = 32
"""With more devices, only the first ones are plotted."""

LONGEST_FLAT = 9
"""Characters of a label that fit beside their neighbours: bars are 0.7 inches apart."""


def draw(plan: Plan, path: Path) -> None:
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise MissingExtra("matplotlib", "plot", "--plot") from None
    from io import BytesIO

    from windlass.model.formats.disk.atomic import write_atomically

    figure = _draw_step(pyplot, plan) if plan.step else _draw_memory(pyplot, plan)
    picture = BytesIO()
    kind = path.suffix.lstrip(".").lower() or "png"
    if kind not in figure.canvas.get_supported_filetypes():
        raise BadInput(f"--plot {path}: use a .png, .svg or .pdf file")
    figure.savefig(picture, format=kind, dpi=150)
    pyplot.close(figure)
    write_atomically(path, picture.getvalue())


def _draw_memory(pyplot: Any, plan: Plan) -> Any:
    devices = plan.memory.per_device[:MOST_BARS]
    figure, axes = pyplot.subplots(figsize=(max(4.5, 1.2 + 0.7 * len(devices)), 4.5), layout="constrained")
    places = range(len(devices))
    base = [0.0] * len(devices)
    for part, colour in PARTS:
        sizes = [getattr(held, f"{part}_bytes") / GIB for held in devices]
        axes.bar(
            places,
            sizes,
            bottom=base,
            label={"kv": "KV cache", "activation": "activations"}.get(part, part),
            color=colour,
            width=0.7,
        )
        base = [low + size for low, size in zip(base, sizes, strict=True)]
    for place, held in zip(places, devices, strict=True):
        axes.hlines(
            held.capacity_bytes / GIB,
            place - 0.42,
            place + 0.42,
            colors="#d62728",
            linewidth=2,
            label="capacity" if place == 0 else "",
        )
    _label_devices(axes, [held.name for held in devices])
    axes.set_ylabel("GiB")
    more = len(plan.memory.per_device) - len(devices)
    axes.set_title(f"{plan.model.name}, {plan.scheme.name}, {plan.layout}" + (f" (and {more} more)" if more else ""), fontsize=10)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


def _draw_step(pyplot: Any, plan: Plan) -> Any:
    """Who takes how long: bars in the order of the step, reads and FLOPs beside them."""
    parts = plan.step[::-1]
    figure, axes = pyplot.subplots(figsize=(7.5, 1.2 + 0.45 * len(parts)), layout="constrained")
    axes.barh([part.name for part in parts], [part.seconds * 1e3 for part in parts], color="#4c78a8")
    for place, part in enumerate(parts):
        moved = [f"{part.num_bytes / 1e9:,.2f} GB"] if part.num_bytes else []
        moved += [f"{part.flops / 1e9:,.1f} GFLOP"] if part.flops else []
        axes.text(part.seconds * 1e3, place, "  " + ", ".join([f"{part.seconds * 1e3:,.3g} ms", *moved]), va="center", fontsize=8)
    axes.set_xlim(0, max(part.seconds for part in parts) * 1.6e3)
    axes.set_xlabel("ms of a decode step")
    axes.set_title(f"{plan.model.name}, {plan.engine}, {plan.scheme.name}, {plan.layout}", fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


def _label_devices(axes: Any, names: list[str]) -> None:
    """One kind of device is named once, below the axis; of several, long names are slanted so that they do not overprint."""
    places = list(range(len(names)))
    if len(set(names)) == 1:
        axes.set_xticks(places, [str(place) for place in places], fontsize=8)
        axes.set_xlabel(f"{len(names)} x {names[0]}" if len(names) > 1 else names[0], fontsize=8)
        return
    labels = [f"{name} {place}" for place, name in enumerate(names)]
    slanted = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(places, labels, fontsize=8, **(slanted if max(map(len, labels)) > LONGEST_FLAT else {}))
