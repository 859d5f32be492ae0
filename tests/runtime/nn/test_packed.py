"""A decoder of packed weights is the decoder of the numbers they stand for; compiled, its activations are rounded to 8 bits too."""

# ruff: noqa: E402 (the folder of whole_panels is put on the path first)

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

KERNELS = str(Path(__file__).parents[2] / "runtime" / "kernels")
if KERNELS not in sys.path:
    sys.path.insert(0, KERNELS)

from whole_panels import of_words

from windlass.model.families import describe, rules
from windlass.runtime.kernels.packing import quantize
from windlass.runtime.kernels.packing.panels import Panels
from windlass.runtime.kernels.program import program
from windlass.runtime.nn import Decoder
from windlass.runtime.weights import DictWeights

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore")]  # warnings are transformers'

GROUP = 32
# Inputs in whole groups.
WIDER = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "head_dim": 32, "kv_lora_rank": 32, "q_lora_rank": 64,
    "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip


class Packed(DictWeights):
    """Every matrix in 8 bits; or, `unpacked`, in the numbers that those codes stand for."""

    def __init__(self, *inputs: Any, unpacked: bool) -> None:
        super().__init__(*inputs)
        self.unpacked = unpacked

    def matrix(self, *names: str) -> Any:
        made = quantize.int8(super().dense_matrix(*names), GROUP)
        panels = of_words("int8", made.codes, made.scale)
        return panels.dense() if self.unpacked else panels

    def experts(self, layer: int, *parts: str) -> Any:
        stacked = super().experts(layer, *parts)
        panels = Panels.allocate("int8", stacked.shape[1], stacked.shape[2], GROUP, num_experts=stacked.shape[0])
        for expert, matrix in enumerate(stacked):
            made = quantize.int8(matrix, GROUP)
            panels.put(0, made.codes, made.scale, expert=expert)
        return torch.stack([panels.dense(expert) for expert in range(len(stacked))]) if self.unpacked else panels


@pytest.fixture(scope="module", params=["llama-tied", "glm4", "glm4_moe", "glm4_moe_lite", "gpt_oss"])
def decoders(request: pytest.FixtureRequest, tiny: Any) -> tuple[Any, Any]:
    config = tiny.config(request.param)
    config |= {key: value for key, value in WIDER.items() if key in config}
    theirs = tiny.transformers_model(config)
    spec = describe(theirs.config.to_dict())
    made = [Decoder(spec, Packed(spec, rules(spec), theirs.state_dict(), unpacked=unpacked)) for unpacked in (False, True)]
    return made[0], made[1]


def logits(decoder: Any, tiny: Any, recorded: bool = False) -> Any:
    tokens = [token * 37 % decoder.spec.vocab_size for token in range(20)]
    step = tiny.step([tiny.chunk(tokens, 0, 20, [1, 0])])
    caches = decoder.make_caches(2, torch.float32)
    if not recorded:
        with torch.no_grad():
            return decoder(step, caches)
    with program.record(step.counts[0:1]) as replay:
        found = decoder(step, caches)
    replay.run()
    return found


def test_the_numbers_they_stand_for(decoders: tuple[Any, Any], tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_NO_NATIVE", "1")
    packed, dense = decoders
    torch.testing.assert_close(logits(packed, tiny), logits(dense, tiny), atol=1e-4, rtol=0)


def test_compiled(decoders: tuple[Any, Any], tiny: Any) -> None:
    """Activations in 8 bits, a scale for 32 of them: about half a percent at each product."""
    if not program.available():
        pytest.skip("nothing is compiled here")
    packed, dense = decoders
    at_once, exact = logits(packed, tiny), logits(dense, tiny)
    assert torch.equal(at_once, logits(packed, tiny, recorded=True))
    differences = (at_once - exact).square().mean(1).sqrt()
    assert float(differences.median()) < 0.05, "rows whose router chose another expert aside"
    assert float(differences.median()) > 1e-4


def test_panels_are_no_parameters(decoders: tuple[Any, Any]) -> None:
    packed, _ = decoders
    assert isinstance(packed.layers[-1].mixer.o.weight, Panels)
    assert all(parameter.dtype == torch.float32 for parameter in packed.parameters())
    assert not any("mixer.o" in name and name.endswith("weight") for name, _ in packed.named_parameters())
