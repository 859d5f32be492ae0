"""Which models the kernels of one GPU generation run, and why not the others."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")
HERE = str(Path(__file__).parents[1])
if HERE not in sys.path:
    sys.path.insert(0, HERE)

from tiny_fused import GLM, LLAMA, QWEN  # noqa: E402

from windlass.core.fused import unsupported  # noqa: E402
from windlass.core.model import MoE  # noqa: E402
from windlass.model.families import describe  # noqa: E402
from windlass.model.families.registry import known_models, spec_of  # noqa: E402

pytestmark = pytest.mark.cpu

HEADS = "attention without heads of 128 dimensions"
QUERIES = "attention with a sliding window, sinks, or more than 16 query heads per kv head"
KIND = "norms or positions other than RMS norm and RoPE"
FUSED = """GLM-4.5-Air GLM-4.5-Air-Base GLM-4.5 GLM-4.6 GLM-4.7 glm-4-9b glm-4-9b-chat INTELLECT-3 Llama-3.1-70B Llama-3.1-8B Llama-2-70B
Llama-3.3-70B-Instruct CodeLlama-70B CodeLlama-70B-Instruct Mistral-7B-v0.3 ALIA-40B Qwen3-8B Qwen3-32B Qwen3-30B-A3B Qwen3-235B-A22B
Llama-3.2-3B Qwen3-4B Qwen3-14B Mistral-Small-24B Llama-3.1-405B Llama-3.1-405B-Instruct Mistral-Large-123B"""
OTHERS = {
    "GLM-4.7-Flash GLM-5 GLM-5.1 GLM-5.2 GLM-5.3 DeepSeek-V3 DeepSeek-R1 DeepSeek-V3.1 Kimi-K2 Llama-3.2-1B Evo2-40B": HEADS,
    "GLM-4-32B-0414 Mistral-7B-v0.1": QUERIES,
    "GLM-4-9B-0414": "layers that are not pre-norm",
    "SmolLM2-135M-Instruct": "a hidden size of 576 or 64 rotary dimensions",
    "gpt-oss-120b gpt-oss-20b": "a hidden size of 2880 or 64 rotary dimensions",
    "Mixtral-8x7B Mixtral-8x22B": "experts with unsupported sizes, biases or clamping",
    "Falcon-7B Falcon-40B Falcon-180B BLOOM-176B GPT-SW3-40B StarCoder GPT-NeoX-20B": KIND,
}


def test_known_models() -> None:
    expected = dict.fromkeys(FUSED.split(), "") | {name: why for names, why in OTHERS.items() for name in names.split()}
    assert {known.name: unsupported(spec_of(known)) for known in known_models()} == expected


@pytest.mark.parametrize(
    ("config", "changes", "why"),
    [
        (LLAMA, {"mlp_bias": True}, "with biases"),
        (LLAMA, {"attention_bias": True}, HEADS),  # its output has one too
        (LLAMA, {"head_dim": 64}, HEADS),
        (LLAMA, {"hidden_act": "gelu"}, "SiLU"),
        (LLAMA, {"hidden_size": 384}, "hidden size of 384"),
        (LLAMA, {"hidden_size": 3328}, "hidden size of 3328"),  # 26 blocks, which few numbers of warps divide, become 27
        (LLAMA, {"num_attention_heads": 17}, "17 heads|16 query heads"),
        (LLAMA, {"num_attention_heads": 19, "num_key_value_heads": 19}, "19 heads"),
        (LLAMA, {"num_attention_heads": 18}, "16 query heads"),
        (GLM, {"n_group": 2, "topk_group": 1}, "groups"),
        (GLM, {"norm_topk_prob": False}, "unnormalized weights"),
        (GLM, {"n_shared_experts": 2}, "shared experts of a different width"),
        (GLM, {"n_routed_experts": 33}, "experts with unsupported sizes, biases or clamping"),
        (GLM, {"moe_intermediate_size": 192}, "experts with unsupported sizes, biases or clamping"),
        (GLM, {"moe_intermediate_size": 17 * 128}, "experts with unsupported sizes, biases or clamping"),
        (GLM, {"num_experts_per_tok": 16}, "experts with unsupported sizes, biases or clamping"),  # and a shared one
        (QWEN, {"num_experts_per_tok": 17}, "experts with unsupported sizes, biases or clamping"),
        (QWEN, {"num_experts_per_tok": 16}, ""),
        (GLM, {"num_experts_per_tok": 15}, ""),
        (LLAMA, {"num_attention_heads": 16}, ""),
    ],
)
def test_what_the_kernels_lack(config: dict[str, Any], changes: dict[str, Any], why: str) -> None:
    found = unsupported(describe(config | changes))
    assert re.search(why, found) if why else not found


def test_a_softmax_with_a_correction_is_not_what_the_kernels_compute() -> None:
    spec = describe(QWEN)
    ffn = spec.layers[0].feed_forward
    assert isinstance(ffn, MoE)
    router = msgspec.structs.replace(ffn.router, correction_bias=True)
    layer = msgspec.structs.replace(spec.layers[0], feed_forward=msgspec.structs.replace(ffn, router=router))
    assert unsupported(msgspec.structs.replace(spec, layers=(layer,))) == "a softmax router with a correction bias"
