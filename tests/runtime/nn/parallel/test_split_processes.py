"""A model over processes that talk by links, or by gloo, says what it says alone, and only the first of them says anything."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
for folder in (Path(__file__).parents[1], Path(__file__).parents[3] / "runtime" / "parallel"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from safetensors.torch import load_file  # noqa: E402
from split_files import converted  # noqa: E402
from split_models import called, replayed, steps_of  # noqa: E402
from split_ranks import run_rank  # noqa: E402
from starting import exit_codes  # noqa: E402
from talking import Way  # noqa: E402

from windlass.core.layout import Layout  # noqa: E402
from windlass.core.scheme import scheme  # noqa: E402
from windlass.runtime.kernels.program import program  # noqa: E402
from windlass.runtime.nn import Decoder  # noqa: E402
from windlass.runtime.weights import CheckpointWeights, open_model  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.multi, pytest.mark.skipif(not program.available(), reason="nothing is compiled here")]


MEMORY, GLOO = Way(), Way("gloo", "127.0.0.1")
SOCKETS = Way(host="127.0.0.1", machines=(0, 1, 2, 3))
FLOAT, DOUBLE = torch.float32, torch.float64


class Case(NamedTuple):
    chosen: str
    packed: bool
    layout: Layout
    way: Way
    dtype: Any
    bound: float
    wanted: int = 0
    """How many logits of a row."""


CASES = {
    "tp3, gloo": Case("llama", False, Layout(tp=3), GLOO, FLOAT, 1e-4),
    "tp3, memory": Case("llama", False, Layout(tp=3), MEMORY, FLOAT, 1e-4),
    "tp4, sockets, float64": Case("llama", False, Layout(tp=4), SOCKETS, DOUBLE, 1e-9),
    "tp2 pp2 ep2, memory, float64": Case("glm4_moe", False, Layout(tp=2, pp=2, ep=2), MEMORY, DOUBLE, 1e-9),
    "tp2 pp2 ep2, sockets, int8 weights": Case("glm4_moe", True, Layout(tp=2, pp=2, ep=2), SOCKETS, FLOAT, 0.06),
    "tp3, memory, two logits": Case("llama", False, Layout(tp=3), MEMORY, FLOAT, 1e-4, wanted=2),
    "tp2 pp2, sockets, two logits": Case("llama", False, Layout(tp=2, pp=2), SOCKETS, FLOAT, 1e-4, wanted=2),
    "tp3, sockets, int8 sums": Case("llama", True, Layout(tp=3), SOCKETS._replace(sync="int8"), FLOAT, 0.5),
}


@pytest.mark.parametrize("name", CASES)
def test_processes(tiny: Any, tmp_path: Path, name: str) -> None:
    """Sums as int8 are near, and not the same."""
    case, how = CASES[name], scheme("int8", 32)
    model_folder, model = converted(tiny.config(case.chosen), tmp_path, how)
    if not case.packed:
        model_folder = tmp_path / "source"
    opened, steps = open_model(model_folder), steps_of(model, tiny)
    run = replayed if case.dtype == FLOAT else called
    expected = run(Decoder(opened.spec, CheckpointWeights(opened, dtype=case.dtype)), steps)
    opened.store.close()
    as_dicts = [{name: value for name, value in vars(step).items() if value is not None} for step, _ in steps]
    for step in as_dicts:
        step["candidates"] = torch.tensor([case.wanted, 0], dtype=torch.int32)
    way = case.way._replace(machines=case.way.machines[: case.layout.world])
    given = (str(tmp_path), str(model_folder), case.layout, how if case.packed else scheme("bf16"), way, case.dtype, as_dicts)
    assert exit_codes(case.layout.world, run_rank, *given) == [0] * case.layout.world
    found = [load_file(tmp_path / f"{rank}.safetensors") for rank in range(case.layout.world)]
    differences = [compared(found[0][str(number)], wanted, case.wanted) for number, wanted in enumerate(expected)]
    assert max(differences) < case.bound
    assert max(differences) > 1e-3 or way.sync == "exact"
    assert not any(logits.numel() for other in found[1:] for logits in other.values())


def compared(found: Any, expected: Any, wanted: int) -> float:
    """Where only some logits are wanted, those that are there, and the largest are."""
    assert found.shape == expected.shape
    if not expected.numel():
        return 0.0
    there = found.isfinite()
    if wanted:
        assert bool(there.gather(1, expected.topk(wanted).indices).all())
        assert 0 < int((~there).sum()) < there.numel()
    else:
        assert bool(there.all())
    return float((found - expected)[there].abs().max())
