"""Tensors of another library's state_dict, under our names: every family, every layout its rules know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from windlass.core.model import MoE  # noqa: E402
from windlass.errors import BadCheckpoint, UnknownName  # noqa: E402
from windlass.model.families import describe, rules  # noqa: E402
from windlass.runtime.weights import DictWeights  # noqa: E402

pytestmark = pytest.mark.cpu

FAMILIES = sorted(
    file.stem for file in (Path(__file__).parents[3] / "model" / "families" / "tiny").glob("*.json") if file.stem != "evo2"
)


def made(tiny: Any, name: str, choice: int = 0, **changes: Any) -> tuple[Any, Any, Any, Any]:
    config = tiny.config(name, **changes)
    found = tiny.rules(config)
    values = tiny.values(found)
    return describe(config), found, values, tiny.stored(found, values, choice)


@pytest.mark.parametrize("choice", [0, 1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_tensor_is_found_and_equal(tiny: Any, name: str, choice: int) -> None:
    spec, found, values, stored = made(tiny, name, choice)
    weights = DictWeights(spec, found, stored)
    for (ours, layer, expert), value in values.items():
        full = ours.format(layer=layer, expert=expert)
        if spec.tied_head and full == "head.weight":
            continue
        got = weights.vector(full) if value.dim() == 1 else weights.matrix(full)
        assert got.dtype is torch.float32 and torch.equal(got, value.float()), full


@pytest.mark.parametrize("name", ["glm4_moe", "mixtral", "gpt_oss", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("choice", [0, 1, 2])
def test_experts_come_stacked(tiny: Any, name: str, choice: int) -> None:
    spec, found, values, stored = made(tiny, name, choice)
    weights = DictWeights(spec, found, stored)
    layer = next(index for index, one in enumerate(spec.layers) if isinstance(one.feed_forward, MoE))
    prefix = "layers.{layer}.ffn.experts.{expert}."
    for parts in (("gate", "up"), ("down",)):
        every = weights.experts(layer, *parts)
        biases = weights.expert_vectors(layer, *parts)
        for expert in range(spec.experts.num_experts):
            expected = torch.cat([values[f"{prefix}{part}.weight", layer, expert] for part in parts])
            assert torch.equal(every[expert], expected.float())
            if biases is not None:
                expected = torch.cat([values[f"{prefix}{part}.bias", layer, expert] for part in parts])
                assert torch.equal(biases[expert], expected.float())
        assert (biases is not None) == (name == "gpt_oss")


def test_several_names_are_stacked(tiny: Any) -> None:
    spec, found, values, stored = made(tiny, "chatglm")
    weights = DictWeights(spec, found, stored)
    for kind in ("weight", "bias"):
        names = [f"layers.1.mixer.{part}.{kind}" for part in "qkv"]
        expected = torch.cat([values[f"layers.{{layer}}.mixer.{part}.{kind}", 1, None] for part in "qkv"]).float()
        assert torch.equal(weights.matrix(*names) if kind == "weight" else weights.vector(*names), expected)


def test_a_tied_head_is_the_embedding_itself(tiny: Any) -> None:
    spec, found, _, stored = made(tiny, "llama-tied")
    weights = DictWeights(spec, found, stored)
    assert weights.matrix("head.weight") is weights.matrix("embed.weight")


def test_gradients_reach_what_was_given_out(tiny: Any) -> None:
    spec, found, _, stored = made(tiny, "glm4_moe")
    weights = DictWeights(spec, found, stored, requires_grad=True, dtype=torch.float64)
    given = [
        weights.matrix("layers.0.mixer.q.weight", "layers.0.mixer.k.weight"),
        weights.vector("layers.0.mixer_norm.weight"),
        weights.experts(1, "gate", "up"),
        weights.dense_matrix("layers.0.mixer.o.weight"),
    ]
    sum(tensor.square().sum() for tensor in given).backward()
    for tensor in given:
        assert tensor.is_leaf and tensor.dtype is torch.float64
        assert torch.equal(tensor.grad, 2 * tensor)
    assert not any(tensor.requires_grad for tensor in stored.values()), "the dictionary's own tensors are left alone"


def test_an_absent_bias_is_none_and_an_unknown_matrix_is_an_error(tiny: Any) -> None:
    spec, found, _, stored = made(tiny, "mistral")
    weights = DictWeights(spec, found, stored)
    assert weights.vector("layers.0.mixer.q.bias") is None
    with pytest.raises(UnknownName, match=r"layers.0.mixer.queue.weight"):
        weights.matrix("layers.0.mixer.queue.weight")


def test_a_missing_tensor_is_named(tiny: Any) -> None:
    spec, found, _, stored = made(tiny, "llama")
    del stored["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(BadCheckpoint, match=r"model.layers.1.mlp.up_proj.weight"):
        DictWeights(spec, found, stored).matrix("layers.1.ffn.gate.weight", "layers.1.ffn.up.weight")


def test_transformers_own_names_are_found() -> None:
    """A model as transformers builds it, experts fused, against the rules that know both spellings."""
    transformers = pytest.importorskip("transformers")
    values = json.loads((Path(__file__).parents[3] / "model" / "families" / "tiny" / "qwen3_moe.json").read_text())
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**values))
    spec = describe(values)
    weights = DictWeights(spec, rules(spec), model.state_dict())
    layer = next(index for index, one in enumerate(spec.layers) if isinstance(one.feed_forward, MoE))
    assert torch.equal(weights.experts(layer, "gate", "up"), model.model.layers[layer].mlp.experts.gate_up_proj)
    assert torch.equal(weights.matrix("layers.0.mixer.q.weight"), model.model.layers[0].self_attn.q_proj.weight)
