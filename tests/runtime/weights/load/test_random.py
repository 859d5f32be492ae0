"""Weights at random: the shapes, types and bytes of the real ones, finite however deep, experts taken alike, the same every time."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from windlass.core.layout import Layout  # noqa: E402
from windlass.core.place import place  # noqa: E402
from windlass.core.scheme import scheme  # noqa: E402
from windlass.errors import Impossible  # noqa: E402
from windlass.model.families import describe, rules  # noqa: E402
from windlass.runtime.kernels.packing.panels import Panels  # noqa: E402
from windlass.runtime.kernels.step import BLOCK_TOKENS, Step  # noqa: E402
from windlass.runtime.nn import Decoder  # noqa: E402
from windlass.runtime.weights import RandomWeights  # noqa: E402

pytestmark = pytest.mark.cpu

QUANTS = {"int4": "int4", "int8": "int8", "fp8": "fp8", "bf16": torch.bfloat16, "fp32": torch.float32}


def numbers(tokens: int, vocabulary: int) -> Step:
    """One sequence, all logits wanted."""
    every = torch.arange(tokens, dtype=torch.int32)
    return Step(
        tokens=torch.randint(0, vocabulary, (tokens,), generator=torch.Generator().manual_seed(0), dtype=torch.int32),
        positions=every,
        slots=every,
        starts=torch.tensor([0, tokens], dtype=torch.int32),
        lengths=torch.tensor([tokens], dtype=torch.int32),
        blocks=torch.arange(-(-tokens // BLOCK_TOKENS), dtype=torch.int32)[None],
        logit_rows=every,
        counts=torch.tensor([tokens, 1, tokens], dtype=torch.int32),
    )


@pytest.mark.parametrize(("quant", "layers"), [("int4", 100), ("int8", 5), ("fp8", 5), ("bf16", 5), ("fp32", 5)])
def test_a_hundred_layers_stay_finite(tiny: Any, quant: str, layers: int) -> None:
    spec = describe(tiny.config("qwen3", num_hidden_layers=layers, max_window_layers=layers))
    weights = RandomWeights(spec, rules(spec), quant=quant, group=32 if quant.startswith("int") else None)
    held = weights.matrix("layers.0.mixer.q.weight", "layers.0.mixer.k.weight", "layers.0.mixer.v.weight")
    assert (held.kind if isinstance(held, Panels) else held.dtype) == QUANTS[quant]
    with torch.no_grad():
        logits = Decoder(spec, weights, 64)(numbers(8, spec.vocab_size))
    assert torch.isfinite(logits).all() and 0.1 < logits.std() < 10


@pytest.mark.parametrize("name", ["glm4_moe", "gpt2", "deepseek_v3", "gpt_oss", "bloom", "falcon-7b", "llama-tied"])
def test_every_kind_of_model_runs(tiny: Any, name: str) -> None:
    spec = describe(tiny.config(name))
    with torch.no_grad():
        logits = Decoder(spec, RandomWeights(spec, rules(spec), quant="int4", group=32), 64)(numbers(5, spec.vocab_size))
    assert logits.shape == (5, spec.vocab_size) and torch.isfinite(logits).all() and logits.std() > 0.1


def test_experts_are_taken_alike(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from windlass.runtime.nn import moe

    spec = describe(tiny.config("glm4_moe", n_routed_experts=16, num_experts_per_tok=4, n_group=1, topk_group=1, vocab_size=2000))
    taken: list[torch.Tensor] = []
    original = moe.route

    def route(*words: Any, **options: Any) -> Any:
        ids, shares = original(*words, **options)
        taken.append(ids)
        return ids, shares

    monkeypatch.setattr(moe, "route", route)
    with torch.no_grad():
        Decoder(spec, RandomWeights(spec, rules(spec), quant="int4", group=32), 256)(numbers(256, spec.vocab_size))
    assert taken
    for ids in taken:
        share = torch.bincount(ids.flatten().long(), minlength=16) / ids.numel()
        assert share.max() < 4 / 16 and (share > 0).all()


def test_the_seed_decides(tiny: Any) -> None:
    spec = describe(tiny.config("glm4_moe"))

    def made(seed: int) -> list[torch.Tensor]:
        weights = RandomWeights(spec, rules(spec), quant="int4", group=32, seed=seed)
        layer = spec.num_layers - 1
        parts = [
            weights.matrix("embed.weight"),
            weights.matrix("layers.0.mixer.q.weight"),
            weights.experts(layer, "gate", "up"),
            weights.vector("layers.0.mixer_norm.weight"),
        ]
        return [part.data if isinstance(part, Panels) else part for part in parts]

    assert all(torch.equal(one, other) for one, other in zip(made(1), made(1), strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(made(1), made(2), strict=True))


def test_layers_differ(tiny: Any) -> None:
    spec = describe(tiny.config("qwen3"))
    for quant in ("int4", "bf16"):
        weights = RandomWeights(spec, rules(spec), quant=quant, group=32 if quant == "int4" else None)
        one, other = (weights.matrix(f"layers.{layer}.ffn.down.weight") for layer in (0, 1))
        assert not torch.equal(*(part.data if isinstance(part, Panels) else part for part in (one, other)))


def test_a_rank_has_its_part(tiny: Any) -> None:
    spec = describe(tiny.config("glm4_moe", num_attention_heads=12, num_key_value_heads=4, intermediate_size=128))
    found, how = rules(spec), scheme("int4", 32)
    placed = place(found, spec.num_layers, Layout(tp=4, ep=2), how)
    ranks = [RandomWeights(spec, found, quant=how, placement=placed, tp_index=index) for index in range(4)]
    whole = RandomWeights(spec, found, quant=how)
    layer = spec.num_layers - 1
    assert (
        sum(rank.matrix("layers.0.mixer.q.weight").shape[0] for rank in ranks) == whole.matrix("layers.0.mixer.q.weight").shape[0]
    )
    assert sum(rank.experts(layer, "down").num_experts for rank in ranks) == 2 * spec.experts.num_experts
    for rank in ranks[1:]:  # what all must agree on
        for name in ("layers.0.mixer_norm.weight", f"layers.{layer}.ffn.router.correction"):
            assert torch.equal(rank.vector(name), ranks[0].vector(name))
        router = f"layers.{layer}.ffn.router.weight"
        assert torch.equal(rank.matrix(router), ranks[0].matrix(router))


def test_what_cannot_run_is_refused(tiny: Any) -> None:
    spec = describe(tiny.config("evo2"))
    with pytest.raises(Impossible, match="cannot be run"):
        RandomWeights(spec, rules(spec))
