"""The same decoder in half precision, and on another device: the path that GPUs take."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from windlass.model.families import rules  # noqa: E402
from windlass.runtime.kernels.step import Step  # noqa: E402
from windlass.runtime.nn import Decoder  # noqa: E402
from windlass.runtime.weights import DictWeights  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore")]  # warnings are transformers'

TOKENS = [11, 3, 58, 3, 7, 99, 21, 64, 2, 40, 5]


def decoder_in(pair: Any, dtype: Any, device: str = "cpu") -> Any:
    spec = pair.ours.spec
    return Decoder(spec, DictWeights(spec, rules(spec), pair.state, dtype=dtype, device=device))


def both_halves(decoder: Any, tiny: Any, dtype: Any, device: str = "cpu") -> Any:
    """Logits of a prefill and of the tokens after it, through a cache."""
    caches = decoder.make_caches(2, dtype, device)
    steps = [tiny.step([tiny.chunk(TOKENS, first, last, [1])], padding=2) for first, last in ((0, 8), (8, 11))]
    with torch.no_grad():
        return torch.cat([decoder(on_device(step, device), caches) for step in steps])


def on_device(step: Step, device: str) -> Step:
    moved = {name: value.to(device) for name, value in vars(step).items() if name != "counts" and isinstance(value, torch.Tensor)}
    return Step(**moved, counts=step.counts)


def test_half_precision(pair: Any, tiny: Any) -> None:
    """bf16 keeps 8 bits: logits of about one agree to some percent, all but those of a row that chose another expert."""
    logits = both_halves(decoder_in(pair, torch.bfloat16), tiny, torch.bfloat16)
    assert logits.dtype == torch.float32
    differences = (logits - pair.expected(TOKENS)).abs().amax(1)
    assert float(differences.median()) < 0.25
    assert float(differences.median()) > 1e-4, "this was not half precision"


def test_routers_stay_in_full_precision(tiny: Any) -> None:
    feed_forward = decoder_in(tiny.pair("glm4_moe"), torch.bfloat16).layers[1].feed_forward
    assert feed_forward.router.weight.dtype == torch.float32
    assert feed_forward.gate_up.dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu(pair: Any, tiny: Any) -> None:
    logits = both_halves(decoder_in(pair, torch.float32, "cuda"), tiny, torch.float32, "cuda")
    assert float((logits.cpu() - pair.expected(TOKENS)).abs().max()) < 1e-3
