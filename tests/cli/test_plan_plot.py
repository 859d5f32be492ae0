"""The plot of a plan: labels do not lie on one another."""

from __future__ import annotations

from itertools import pairwise

import pytest

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    "names",
    [["H100-80GB"] * 8, ["RTX-PRO-6000", "RTX-4090", "RTX-PRO-6000", "cpu:16"], ["A100-80GB-PCIe"] * 2 + ["H200"], ["H200"]],
)
def test_labels_do_not_overprint(names: list[str]) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    from windlass.cli.plan.plot import _label_devices

    figure, axes = pyplot.subplots(figsize=(max(4.5, 1.2 + 0.7 * len(names)), 4.5), layout="constrained")
    axes.bar(range(len(names)), [1.0] * len(names))
    _label_devices(axes, names)
    figure.canvas.draw()
    labels = axes.get_xticklabels()
    if labels[0].get_rotation() == 0:
        boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: box.x0)
        assert all(left.x1 <= right.x0 for left, right in pairwise(boxes))
    else:  # slanted: beside one another if the places are a line height apart
        places = [label.get_window_extent().x1 for label in labels]
        assert min(right - left for left, right in pairwise(places)) > labels[0].get_fontsize()
    pyplot.close(figure)
