"""Gradients, against differences in float64: through every kind of mixer and feed-forward, and through every family whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from windlass.model.families import rules  # noqa: E402
from windlass.runtime.nn import Decoder  # noqa: E402
from windlass.runtime.weights import DictWeights  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore")]  # warnings are transformers'

# What each of these has that the others do not.
MIXERS = {
    "norms of heads, part of each turned by halves": "glm4_moe",
    "part of each head turned by pairs": "glm4",
    "bands": "llama",
    "window": "mixtral+window",
    "window, sinks, yarn": "gpt_oss",
    "slopes": "bloom",
    "slopes before scaling": "falcon-rw",
    "one head of keys for all": "falcon-7b",
    "latent": "deepseek_v3+groups",
    "latent, queries whole": "deepseek_v3-full_query",
}
FEED_FORWARDS = {
    "gated": ("llama", 0),
    "biases, not gated": ("gpt2", 0),
    "exact gelu": ("gpt_neox", 0),
    "sigmoid router, shared expert": ("glm4_moe", 1),
    "groups": ("deepseek_v3+groups", 1),
    "softmax router": ("qwen3_moe", 1),
    "softmax of the chosen": ("mixtral", 0),
    "clamped": ("gpt_oss+small_clamp", 0),
}


def trainable(pair: Any) -> Any:
    """The same model in float64, every weight a leaf."""
    spec = pair.ours.spec
    return Decoder(spec, DictWeights(spec, rules(spec), pair.state, requires_grad=True, dtype=torch.float64))


def parts(tiny: Any, name: str, layer: int) -> Any:
    return trainable(tiny.pair(name)).layers[layer]


def check(function: Callable[[], Any], inputs: list[Any]) -> None:
    """`function` sees `inputs` through whatever it closes over; differences are taken along random directions."""
    assert inputs
    assert torch.autograd.gradcheck(lambda *_: function(), tuple(inputs), fast_mode=True)


def rows(count: int, width: int) -> Any:
    return torch.randn(count, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.fixture
def step(tiny: Any) -> Any:
    """Two sequences, the first longer than the window of `mixtral+window`."""
    return tiny.step([tiny.chunk([0] * 11, 0, 11), tiny.chunk([0] * 3, 0, 3)])


@pytest.mark.parametrize("name", MIXERS.values(), ids=MIXERS.keys())
def test_mixer(tiny: Any, step: Any, name: str) -> None:
    mixer = parts(tiny, name, 0).mixer
    x, residual = (rows(14, tiny.pair(name).ours.spec.hidden_size) for _ in range(2))
    check(lambda: mixer(x, step, None, residual), [x, residual, *mixer.parameters()])


@pytest.mark.parametrize("name", ["deepseek_v3+groups", "deepseek_v3-full_query", "glm4_moe_lite"])
def test_learning_latents_are_those_that_serve(tiny: Any, step: Any, name: str) -> None:
    """Taken up to every head, or asked in the latent: the same attention, whether its weights learn or something before them."""
    pair = tiny.pair(name)
    learning = parts(tiny, name, 0).mixer
    frozen = Decoder(pair.ours.spec, DictWeights(pair.ours.spec, rules(pair.ours.spec), pair.state, dtype=torch.float64)).layers[
        0
    ]
    x = rows(14, pair.ours.spec.hidden_size)
    with torch.no_grad():
        expected = learning(x, step, None)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(learning(x, step, None), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(frozen.mixer(x, step, None), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("name", "layer"), FEED_FORWARDS.values(), ids=FEED_FORWARDS.keys())
def test_feed_forward(tiny: Any, name: str, layer: int) -> None:
    feed_forward = parts(tiny, name, layer).feed_forward
    x, residual = (rows(9, tiny.pair(name).ours.spec.hidden_size) for _ in range(2))
    learning = [parameter for key, parameter in feed_forward.named_parameters() if key != "correction"]
    check(lambda: feed_forward(x, residual), [x, residual, *learning])


def test_the_correction_only_chooses(tiny: Any) -> None:
    """It is moved by counting who was chosen, not by gradients."""
    feed_forward = parts(tiny, "glm4_moe", 1).feed_forward
    feed_forward(rows(9, 24)).sum().backward()
    assert feed_forward.correction.grad is None
    assert feed_forward.router.weight.grad.abs().max() > 0


def test_whole(pair: Any, tiny: Any) -> None:
    decoder = trainable(pair)
    step = tiny.step([tiny.chunk([5, 3, 8, 5, 1, 9, 2], 0, 7), tiny.chunk([4, 4], 0, 2)], logit_rows=[8, 6, 2])
    learning = [parameter for key, parameter in decoder.named_parameters() if not key.endswith("correction")]
    check(lambda: decoder(step), learning)


def test_a_broken_gradient_is_noticed(tiny: Any) -> None:
    feed_forward = parts(tiny, "llama", 0).feed_forward
    x = rows(4, 24)
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        check(lambda: feed_forward(x.detach(), x), [x])
