"""Adapters beside packed weights: the model begins as it was, learns, leaves what is frozen alone, and is saved as PEFT has it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
for folder in (Path(__file__).parents[1], Path(__file__).parents[3] / "runtime" / "nn"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from made import FOLDER, Counting, recipe  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from split_files import converted  # noqa: E402

from windlass.core.scheme import scheme  # noqa: E402
from windlass.errors import BadInput  # noqa: E402
from windlass.runtime.kernels.packing.panels import Panels  # noqa: E402
from windlass.runtime.nn import Decoder  # noqa: E402
from windlass.runtime.weights import open_model  # noqa: E402
from windlass.tasks.train.build import build_trainer  # noqa: E402
from windlass.tasks.train.export.adapters import save_adapter  # noqa: E402
from windlass.tasks.train.model.init import LoadedWeights  # noqa: E402
from windlass.tasks.train.model.model import TrainingModel  # noqa: E402
from windlass.tasks.train.model.packing import packed_step  # noqa: E402

pytestmark = pytest.mark.cpu
RANK, ALPHA = 4, 8.0
ALL = ["attention", "feed_forward", "experts"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = json.loads((FOLDER / "glm4_moe.json").read_text())
    return converted(config, tmp_path_factory.mktemp("base"), scheme("int4", 32))[0]


def trainer(base: Path, targets: list[str], **sections: Any) -> tuple[Any, Any]:
    opened = open_model(base)
    made = recipe(lora={"rank": RANK, "alpha": ALPHA, "targets": targets}, optimizer={"lr": 2e-2}, **sections)
    return build_trainer(made, opened.spec, opened.rules, Counting(opened.spec.vocab_size), opened=opened), opened


def logits(decoder: Any, batch: Any) -> Any:
    step = packed_step(batch)
    return decoder.logits(TrainingModel(decoder).hidden(decoder.embedded(step), step))


class Merged(LoadedWeights):
    """The checkpoint's numbers with those of a saved adapter added, found by the names of the file."""

    adapter: dict[str, Any]

    def _values(self, ours: Any) -> Any:
        name = ours.rule.sources[0].name.format(layer=ours.layer, expert=ours.expert).removesuffix(".weight")
        found, key = super()._values(ours), f"base_model.model.{name}"
        if f"{key}.lora_A.weight" not in self.adapter:
            return found
        return found + ALPHA / RANK * self.adapter.pop(f"{key}.lora_B.weight") @ self.adapter.pop(f"{key}.lora_A.weight")


@pytest.mark.parametrize("targets", [["attention"], ALL], ids=["attention", "all"])
def test_learns_beside_packed_weights(base: Path, tmp_path: Path, targets: list[str]) -> None:
    made, opened = trainer(base, targets)
    packed = [matrix for module in made.model.modules() for matrix in vars(module).values() if isinstance(matrix, Panels)]
    assert packed
    before = [matrix.data.clone() for matrix in packed]
    batch = made.batches.batch(0, 2)
    plain = Decoder(opened.spec, LoadedWeights(opened), 16)
    torch.testing.assert_close(logits(made.model.decoder, batch), logits(plain, batch), rtol=1e-3, atol=1e-3)
    losses = [made.step().loss for _ in range(12)]
    assert losses[-1] < 0.9 * losses[0]
    assert all(torch.equal(matrix.data, old) for matrix, old in zip(packed, before, strict=True))
    assert all("lora" in name for name in made.state()["model"])
    save_adapter(made.state()["model"], opened.rules, recipe(lora={"rank": RANK, "alpha": ALPHA}).lora, "base", tmp_path)
    weights = Merged(opened)
    weights.adapter = load_file(tmp_path / "adapter_model.safetensors")
    count = len(weights.adapter)
    merged = Decoder(opened.spec, weights, 16)
    assert count and not weights.adapter  # every saved tensor has its matrix
    torch.testing.assert_close(logits(made.model.decoder, batch), logits(merged, batch), rtol=1e-3, atol=1e-3)


def test_what_peft_reads(base: Path, tmp_path: Path) -> None:
    made, opened = trainer(base, ALL)
    names = save_adapter(made.state()["model"], opened.rules, recipe(lora={"rank": RANK}).lora, "org/model", tmp_path)
    assert "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight" in names
    assert "base_model.model.model.layers.1.mlp.experts.3.down_proj.lora_B.weight" in names
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["base_model_name_or_path"]) == ("LORA", RANK, "org/model")
    assert {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"} == set(config["target_modules"])
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "adapter_model.safetensors").items()}
    assert shapes["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"] == (RANK, 64)
    assert shapes["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"] == (192, RANK)


def test_corrections_of_a_frozen_router_stay(base: Path) -> None:
    made, _ = trainer(base, ["attention"])
    corrections = [watch.moe.correction.clone() for watch in made.balancers]
    made.step()
    assert all(torch.equal(watch.moe.correction, old) for watch, old in zip(made.balancers, corrections, strict=True))


def test_nothing_to_adapt(base: Path) -> None:
    opened = open_model(base)
    with pytest.raises(BadInput, match="needs weights to start from"):
        build_trainer(recipe(lora={"rank": 2}), opened.spec, opened.rules, Counting(64))
