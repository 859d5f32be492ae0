"""A guess is the choice that the next layer would make of the same residual stream."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from windlass.core.launch import Launch, RandomInit  # noqa: E402
from windlass.runtime.engine.engine import Engine  # noqa: E402
from windlass.runtime.engine.load import load_model  # noqa: E402
from windlass.runtime.kernels.ops.norm import reference  # noqa: E402
from windlass.runtime.kernels.ops.route import route  # noqa: E402
from windlass.runtime.nn.guess import next_experts  # noqa: E402
from windlass.runtime.nn.layer import DecoderLayer  # noqa: E402
from windlass.runtime.nn.moe import MixtureOfExperts  # noqa: E402

pytestmark = pytest.mark.cpu

TINY = Path(__file__).parents[2] / "model" / "families" / "tiny"


def layers(name: str) -> tuple[Engine, DecoderLayer, DecoderLayer]:
    config = json.loads((TINY / f"{name}.json").read_text())
    launch = Launch(
        model=name, device="cpu", random_weights=RandomInit(config=config, scheme="bf16"), context_tokens=32, kv_bytes=2**20
    )
    engine, _ = load_model(launch)
    found = [layer for layer in engine.runner.decoder.layers if isinstance(layer.feed_forward, MixtureOfExperts)]
    return engine, found[0], found[-1]


def set_norm(layer: DecoderLayer, weight: torch.Tensor) -> None:
    layer.ffn_norm.weight = torch.nn.Parameter(weight, requires_grad=False)


@pytest.mark.parametrize(("name", "least"), [("mixtral", 0.1), ("glm4_moe", 1.0)])
def test_norm_and_router_of_the_next_layer(name: str, least: float) -> None:
    """Where scores are compared with corrections, weights of one size: others change how large a row is, which is only about right."""
    engine, layer, following = layers(name)
    torch.manual_seed(0)
    hidden = engine.runner.decoder.spec.hidden_size
    set_norm(layer, torch.full((hidden,), 3.0) if least == 1.0 else torch.rand(hidden) + least)
    set_norm(following, torch.rand(hidden) + 0.5)
    x, moe = torch.randn(5, hidden), following.feed_forward
    before, after = (reference(x, one.ffn_norm.weight, None, 1e-6, "rms") for one in (layer, following))
    with torch.no_grad():
        chosen, _ = route(moe.router(after), moe.correction, moe.moe.router, moe.moe.num_active)
        guess = next_experts(layer, following)
        assert guess is not None
        assert guess(before).sort(-1).values.tolist() == chosen.sort(-1).values.tolist()
    engine.close()


def test_no_guess_after_a_norm_that_subtracts_the_mean() -> None:
    engine, layer, following = layers("mixtral")
    layer.ffn_norm.kind = "layer"
    assert next_experts(layer, following) is None
    engine.close()
