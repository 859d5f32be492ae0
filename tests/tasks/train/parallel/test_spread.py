"""A run over two or four processes is the run of one: losses, gradient norms, weights and moments in float64, three steps, to 1e-9.

With shapes of what each rank holds: a layout that does nothing also has perfect losses.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if str(Path(__file__).parents[1]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parents[1]))

from processes import exit_codes  # noqa: E402
from spread_rank import CHANGES, LIMIT, STEPS, run_rank, trained  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.multi]

OF_TWO = {"fsdp2": {"fsdp": 2}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "ep2": {"ep": 2, "fsdp": 1}}
OF_FOUR = {
    "fsdp2 x tp2": {"fsdp": 2, "tp": 2},
    "fsdp2 x ep2": {"fsdp": 2, "ep": 2},
    "pp2 x fsdp2": {"pp": 2, "fsdp": 2},
}
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, WIDTH, VOCAB = 24, 6, 2, 12, 6, 8, 64
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process makes of it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    trainer = trained({}, "glm4_moe", CHANGES)
    reports = [trainer.step() for _ in range(STEPS)]
    state = trainer.state()
    folder = tmp_path_factory.mktemp("alone")
    expected = {
        "losses": [report.loss for report in reports],
        "norms": [report.grad_norm for report in reports],
        "model": {name: tensor.clone() for name, tensor in state["model"].items()},
        "exp_avg_sq": {name: tensor.clone() for name, tensor in state["optimizer"]["exp_avg_sq"].items()},
        "loads": reports[-1].expert_load,
        "parts": reports[-1].parts,
        "validation": trainer.validate(),
        "after": trainer.step().loss,
    }
    torch.save(expected, folder / "expected.pt")
    torch.set_num_threads(threads)
    return folder


@pytest.fixture(scope="module")
def found(alone: Path) -> dict[str, list[dict[str, Any]]]:
    """By layout, what each rank says."""
    said: dict[str, list[dict[str, Any]]] = {}
    for world, layouts in ((2, OF_TWO), (4, OF_FOUR)):
        (alone / "store").unlink(missing_ok=True)
        assert exit_codes(world, run_rank, str(alone), layouts, "glm4_moe", CHANGES) == [0] * world
        ranks = [json.loads((alone / f"{rank}.json").read_text()) for rank in range(world)]
        said |= {label: [rank[label] for rank in ranks] for label in layouts}
    return said


@pytest.mark.parametrize("layout", [*OF_TWO, *OF_FOUR])
def test_split_is_alone(found: dict[str, list[dict[str, Any]]], layout: str) -> None:
    for rank in found[layout]:
        assert rank["losses"][-1] < 0.99 * rank["losses"][0]
        for what in ("loss_error", "norm_error", "weight_error", "moment_error", "validation_error", "after"):
            assert rank[what] < LIMIT, what
        assert rank["loads"]
        assert all(error < 1e-6 for error in rank["parts"].values())


@pytest.mark.parametrize("layout", [*OF_TWO, *OF_FOUR])
def test_time_in_collectives_is_counted(found: dict[str, list[dict[str, Any]]], layout: str) -> None:
    """Of sums of numbers in every layout, of the passes where they communicate, of gradients where FSDP does not sum them."""
    for rank in found[layout]:
        assert rank["waited"]["sums"] > 0 and rank["waited"]["model"] > 0
        assert (rank["waited"]["gradients"] > 0) == (layout in ("tp2", "ep2", "fsdp2 x tp2"))


LAYER = "decoder.layers.1."
SHAPES: dict[str, dict[str, list[list[int]]]] = {
    # parameter -> its shape on each rank
    "fsdp2": {
        "mixer.qkv.weight": [[QKV // 2, HIDDEN]] * 2,
        "feed_forward.experts.gate_up": [[EXPERTS // 2, 2 * WIDTH, HIDDEN]] * 2,
        "mixer_norm.weight": [[HIDDEN // 2]] * 2,
    },
    "tp2": {
        "mixer.qkv.weight": [[QKV // 2, HIDDEN]] * 2,
        "mixer.o.weight": [[HIDDEN, HEADS * HEAD_DIM // 2]] * 2,
        "feed_forward.experts.gate_up": [[EXPERTS, WIDTH, HIDDEN]] * 2,
        "feed_forward.experts.down": [[EXPERTS, HIDDEN, WIDTH // 2]] * 2,
        "mixer_norm.weight": [[HIDDEN]] * 2,
    },
    "ep2": {
        "mixer.qkv.weight": [[QKV, HIDDEN]] * 2,
        "feed_forward.experts.inner.gate_up": [[EXPERTS // 2, 2 * WIDTH, HIDDEN]] * 2,
        "feed_forward.experts.inner.down": [[EXPERTS // 2, HIDDEN, WIDTH]] * 2,
    },
    "fsdp2 x tp2": {
        "mixer.qkv.weight": [[QKV // 4, HIDDEN]] * 4,
        "feed_forward.experts.gate_up": [[EXPERTS // 2, WIDTH, HIDDEN]] * 4,
    },
    "fsdp2 x ep2": {
        "mixer.qkv.weight": [[QKV // 2, HIDDEN]] * 4,
        # three experts a rank, which two ranks then share: two and one
        "feed_forward.experts.inner.gate_up": [[2, 2 * WIDTH, HIDDEN], [2, 2 * WIDTH, HIDDEN], *[[1, 2 * WIDTH, HIDDEN]] * 2],
    },
}


@pytest.mark.parametrize("layout", SHAPES)
def test_each_rank_holds_its_part(found: dict[str, list[dict[str, Any]]], layout: str) -> None:
    for name, shapes in SHAPES[layout].items():
        assert [rank["local"][LAYER + name] for rank in found[layout]] == shapes, name


def test_stages_hold_their_layers(found: dict[str, list[dict[str, Any]]]) -> None:
    first, last = found["pp2"]
    assert "embed.weight" in first["held"]
    assert "head.weight" not in first["held"]
    assert {"head.weight", "norm.weight"} <= last["held"].keys()
    layers = [{name.split(".")[1] for name in rank["held"] if name.startswith("layers.")} for rank in (first, last)]
    assert layers == [{"0", "1"}, {"2"}]
    qkv = "decoder.layers.0.mixer.qkv.weight"
    assert [rank["local"][qkv] for rank in found["pp2 x fsdp2"]] == [[QKV // 2, HIDDEN]] * 4
    assert sum("head.weight" in rank["held"] for rank in found["pp2 x fsdp2"]) == 2


FEWEST = {"fsdp2": 0.6, "tp2": 0.75, "pp2": 0.75, "ep2": 0.9, "fsdp2 x tp2": 0.4, "fsdp2 x ep2": 0.5, "pp2 x fsdp2": 0.4}
"""Of all numbers, the most that a rank may hold."""


@pytest.mark.parametrize("layout", [*OF_TWO, *OF_FOUR])
def test_together_they_hold_all(found: dict[str, list[dict[str, Any]]], alone: Path, layout: str) -> None:
    whole = torch.load(alone / "expected.pt", weights_only=True)["model"]
    assert {name for rank in found[layout] for name in rank["held"]} == whole.keys()
    fewest = FEWEST[layout]
    total = sum(tensor.numel() for tensor in whole.values())
    for rank in found[layout]:
        held = sum(torch.Size(shape).numel() for shape in rank["held"].values())
        assert held < fewest * total
