"""Packed weights, cut where their groups allow: ranks together say what one says, of the files that conversion writes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
HERE = str(Path(__file__).parents[1])
if HERE not in sys.path:
    sys.path.insert(0, HERE)

from split_files import converted  # noqa: E402
from split_models import Split, called, replayed, run_split, steps_of  # noqa: E402

from windlass.core.layout import Layout  # noqa: E402
from windlass.core.scheme import scheme  # noqa: E402
from windlass.runtime.kernels.packing.panels import Panels  # noqa: E402
from windlass.runtime.kernels.program import program  # noqa: E402
from windlass.runtime.nn import Decoder  # noqa: E402
from windlass.runtime.weights import CheckpointWeights, open_model  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.multi]

SPLITS = (Split(Layout(tp=2)), Split(Layout(tp=3)), Split(Layout(tp=2, pp=2, ep=2), shares=(1.0, 1.6)))


@pytest.mark.parametrize("bits", ["int4", "int8"])
@pytest.mark.parametrize("chosen", ["llama", "glm4_moe"])
def test_packed(tiny: Any, tmp_path: Path, chosen: str, bits: str) -> None:
    """Exact in float64, where codes are the numbers they stand for. Compiled, activations are rounded to 8 bits, in the same blocks of 32
    however many ranks there are: mostly as near as fp32, and where one falls the other way, as near as 8 bits are."""
    how = scheme(bits, 32)
    folder, model = converted(tiny.config(chosen), tmp_path, how)
    opened = open_model(folder)
    steps = steps_of(model, tiny)
    for dtype, run, bound in ((torch.float64, called, 1e-9), (torch.float32, replayed, 0.06)):
        if run is replayed and not program.available():
            continue
        expected = run(Decoder(opened.spec, CheckpointWeights(opened, dtype=dtype)), steps)
        for split in SPLITS:
            ran = run_split(model, split, steps, run, lambda *at, to=dtype: part(opened, *at, dtype=to), how)
            assert all(isinstance(one.decoder.layers[0].mixer.o.weight, Panels) for one in ran)
            differences = [float((a - b).abs().max()) for a, b in zip(ran[0].logits, expected, strict=True) if b.numel()]
            assert max(differences) < bound, (dtype, split, differences)
    opened.store.close()


def part(opened: Any, placement: Any, tp_index: int, *, dtype: Any) -> CheckpointWeights:
    return CheckpointWeights(opened, placement=placement, tp_index=tp_index, dtype=dtype)
