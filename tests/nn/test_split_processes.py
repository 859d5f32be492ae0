"""A model over processes that talk by gloo says what it says alone, and only the first of them says anything."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
for folder in (Path(__file__).parent, Path(__file__).parents[1] / "parallel"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from safetensors.torch import load_file  # noqa: E402
from split_files import converted  # noqa: E402
from split_models import replayed, steps_of  # noqa: E402
from split_ranks import run_rank  # noqa: E402
from starting import exit_codes  # noqa: E402

from windlass.core.layout import Layout  # noqa: E402
from windlass.core.scheme import scheme  # noqa: E402
from windlass.kernels import program  # noqa: E402
from windlass.nn import Decoder  # noqa: E402
from windlass.weights import CheckpointWeights, open_model  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.multi, pytest.mark.skipif(not program.available(), reason="nothing is compiled here")]


@pytest.mark.parametrize(
    ("chosen", "packed", "layout", "bound"),
    [("llama", False, Layout(tp=3), 1e-4), ("glm4_moe", True, Layout(tp=2, pp=2, ep=2), 0.06)],
    ids=("tp3", "tp2 pp2 ep2, int8"),
)
def test_processes(tiny: Any, tmp_path: Path, chosen: str, packed: bool, layout: Layout, bound: float) -> None:
    how = scheme("int8", 32)
    model_folder, model = converted(tiny.config(chosen), tmp_path, how)
    if not packed:
        model_folder = tmp_path / "source"
    opened, steps = open_model(model_folder), steps_of(model, tiny)
    expected = replayed(Decoder(opened.spec, CheckpointWeights(opened)), steps)
    opened.store.close()
    as_dicts = [{name: value for name, value in vars(step).items() if value is not None} for step, _ in steps]
    given = (str(tmp_path), str(model_folder), layout, how if packed else scheme("bf16"), as_dicts)
    assert exit_codes(layout.world, run_rank, *given) == [0] * layout.world
    found = [load_file(tmp_path / f"{rank}.safetensors") for rank in range(layout.world)]
    for number, wanted in enumerate(expected):
        assert found[0][str(number)].shape == wanted.shape
        assert not wanted.numel() or float((found[0][str(number)] - wanted).abs().max()) < bound
    assert not any(logits.numel() for other in found[1:] for logits in other.values())
