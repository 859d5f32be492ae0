"""Export: every family's tensors under their published names, as other programs and our own readers load them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

import torch

from windlass.core.rule import ModelPart, Rule
from windlass.errors import BadCheckpoint, BadInput
from windlass.model.families import describe, rules
from windlass.runtime.kernels.step import Step
from windlass.runtime.nn import Decoder
from windlass.runtime.weights import CheckpointWeights, open_model, open_source
from windlass.runtime.weights.source import OpenedModel
from windlass.runtime.weights.tensors.readers import reader
from windlass.runtime.weights.tensors.tensor_index import TensorIndex
from windlass.runtime.weights.tensors.validate import locate_tensors, tensors_of
from windlass.tasks.train.export.export import export_model

pytestmark = pytest.mark.cpu

TINY = Path(__file__).parents[3] / "model" / "families" / "tiny"
FAMILIES = sorted(path.stem for path in TINY.glob("*.json"))


class Made:
    """Random tensors of a model, by our names."""

    def __init__(self, made: tuple[Rule, ...], *, mtp: bool = True) -> None:
        chance = torch.Generator().manual_seed(0)
        self.tensors: dict[str, torch.Tensor] = {}
        for rule in made:
            if rule.copy_of is not None or (rule.part is ModelPart.NEXT_TOKEN and not mtp):
                continue
            for layer in rule.layers if rule.layers is not None else (None,):
                for expert in range(rule.num_experts) if rule.num_experts else (None,):
                    name = rule.ours.format(layer=layer, expert=expert)
                    self.tensors[name] = torch.randn(rule.shape, generator=chance) * 0.05

    def has(self, name: str) -> bool:
        return name in self.tensors

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def whole_step(tokens: torch.Tensor) -> Step:
    """One sequence, seen whole, all of its logits."""
    rows = torch.arange(len(tokens), dtype=torch.int32)
    ends = torch.tensor([0, len(tokens)], dtype=torch.int32)
    return Step(
        tokens=tokens.to(torch.int32),
        positions=rows,
        slots=rows,
        starts=ends,
        lengths=ends[1:],
        blocks=torch.zeros((1, 2), dtype=torch.int32),
        logit_rows=rows,
        counts=torch.tensor([len(tokens), 1, len(tokens)], dtype=torch.int32),
    )


def tiny(name: str) -> tuple[dict[str, Any], tuple[Rule, ...]]:
    config = json.loads((TINY / f"{name}.json").read_text())
    return config, rules(describe(config))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_reads_its_export(name: str, tmp_path: Path) -> None:
    """Through the rules that read published checkpoints, tensor by tensor."""
    config, made = tiny(name)
    trained = Made(made)
    done = export_model(trained, made, config, tmp_path / "out", dtype="fp32", max_shard_bytes=20_000)
    assert len(done.files) > 1
    opened = open_source(tmp_path / "out")
    assert opened.spec.layers == describe(config).layers
    places = locate_tensors(opened.rules, opened.store)  # refuses a tensor too many or too few
    read = 0
    for rule in opened.rules:
        for ours in tensors_of(rule):
            expected = trained.tensors[ours.name if ours.name in trained.tensors else str(rule.copy_of)]
            found = reader(opened.store, ours, places[ours.name])(0, ours.shape[0])
            assert torch.equal(found.reshape(ours.shape).float(), expected), ours.name
            read += 1
    assert read >= len(trained.tensors)
    opened.store.close()


class Imported:
    """Tensors of an opened checkpoint by our names (`TrainedTensors`)."""

    def __init__(self, opened: OpenedModel) -> None:
        self._opened, self._named = opened, TensorIndex(opened.rules)

    def has(self, name: str) -> bool:
        return name in self._opened.locations

    def tensor(self, name: str) -> torch.Tensor:
        ours = self._named.get(name)
        rows = reader(self._opened.store, ours, self._opened.locations[name])
        return rows(0, ours.shape[0]).float().reshape(ours.shape)


def test_an_import_exports_to_the_same_bytes(tmp_path: Path) -> None:
    config, made = tiny("glm4_moe")
    first = export_model(Made(made), made, config, tmp_path / "first")
    opened = open_model(tmp_path / "first")
    second = export_model(Imported(opened), opened.rules, opened.config, tmp_path / "second")
    opened.store.close()
    assert first.files == second.files
    assert (tmp_path / "first" / "config.json").read_bytes() == (tmp_path / "second" / "config.json").read_bytes()


def test_a_model_trained_without_its_mtp_layer(tmp_path: Path) -> None:
    config = tiny("glm4_moe")[0] | {"num_nextn_predict_layers": 1}
    made = rules(describe(config))
    assert any(rule.part is ModelPart.NEXT_TOKEN for rule in made)
    export_model(Made(made, mtp=False), made, config, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["num_nextn_predict_layers"] == 0 and written["torch_dtype"] == "bfloat16"
    assert open_source(tmp_path / "out").spec.next_token is None
    export_model(Made(made), made, config, tmp_path / "with")
    assert open_source(tmp_path / "with").spec.next_token is not None


def test_the_router_correction_stays_in_32_bits(tmp_path: Path) -> None:
    config, made = tiny("glm4_moe")
    export_model(Made(made), made, config, tmp_path / "out")
    store = open_source(tmp_path / "out").store
    kinds = {store.dtype(name) for name in store.names() if "correction" in name}
    assert kinds == {"F32"} and {store.dtype(name) for name in store.names() if "correction" not in name} == {"BF16"}


def test_transformers_has_the_same_logits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config, made = tiny("glm4_moe")
    trained = Made(made)
    export_model(trained, made, config, tmp_path / "out", dtype="fp32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, experts_implementation="eager"
    ).eval()
    assert type(theirs).__name__ == json.loads((tmp_path / "out" / "config.json").read_text())["architectures"][0]
    ours = Decoder(describe(config), CheckpointWeights(open_model(tmp_path / "out"), dtype=torch.float32))
    tokens = torch.randint(0, config["vocab_size"], (1, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens).logits[0]
        found = ours(whole_step(tokens[0]))
    assert (expected - found).abs().max() < 1e-4


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    config, made = tiny("llama")
    export_model(Made(made), made, config, tmp_path / "out")
    with pytest.raises(BadInput, match="already exists"):
        export_model(Made(made), made, config, tmp_path / "out")


def test_a_tensor_that_is_missing_or_of_another_shape(tmp_path: Path) -> None:
    config, made = tiny("llama")
    trained = Made(made)
    value = trained.tensors.pop("layers.1.mixer.q.weight")
    with pytest.raises(BadCheckpoint, match=r"layers\.1\.mixer\.q\.weight: the checkpoint does not have this tensor"):
        export_model(trained, made, config, tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()
    trained.tensors["layers.1.mixer.q.weight"] = value[:-1]
    with pytest.raises(BadCheckpoint, match=r"has shape \["):
        export_model(trained, made, config, tmp_path / "out")
