"""Tiny models of the kinds that nn.fused runs, with random weights in tiles."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from windlass.core.fused import unsupported
from windlass.core.model import ModelSpec
from windlass.core.scheme import scheme
from windlass.model.families import describe, rules
from windlass.runtime.kernels.cuda.layout import Tiles, dequantize
from windlass.runtime.nn import Decoder
from windlass.runtime.weights.load.random import RandomWeights

COMMON = {
    "vocab_size": 96, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024, "num_hidden_layers": 2,
}  # fmt: skip
GLM = COMMON | {
    "model_type": "glm4_moe", "n_routed_experts": 32, "n_shared_experts": 1, "num_experts_per_tok": 4, "moe_intermediate_size": 128,
    "intermediate_size": 320, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "attention_bias": True, "use_qk_norm": False, "num_nextn_predict_layers": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
QWEN = COMMON | {
    "model_type": "qwen3_moe", "intermediate_size": 320, "moe_intermediate_size": 256, "num_experts": 32, "num_experts_per_tok": 3,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_attention_heads": 8, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}  # fmt: skip
LLAMA = COMMON | {
    "model_type": "llama", "intermediate_size": 320, "attention_bias": False, "mlp_bias": False, "num_attention_heads": 3,
    "num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "glm": (GLM, 64),
    "glm+qk_norm": (GLM | {"use_qk_norm": True, "attention_bias": False, "num_hidden_layers": 3}, 64),
    "glm+128": (GLM | {"intermediate_size": 384}, 128),
    "qwen": (QWEN, 128),
    "llama": (LLAMA, 64),
    "llama+128": (LLAMA | {"intermediate_size": 384}, 128),
    "llama+32": (LLAMA | {"hidden_size": 512, "intermediate_size": 96}, 32),
    "llama+wide": (LLAMA | {"hidden_size": 4608, "intermediate_size": 96, "num_attention_heads": 1, "num_hidden_layers": 1}, 32),
    "llama+deep": (LLAMA | {"intermediate_size": 4416}, 64),
}
"""A config, and the group of its scales. Wide and deep: inputs that are cut into slices."""


class Lively(RandomWeights):
    """Vectors that matter: a choice of experts that their correction changes, biases and norms that are seen in the result."""

    def vector(self, *names: str) -> Any:
        found = super().vector(*names)
        if found is None:
            return None
        if names[0].endswith("correction"):
            return torch.linspace(-0.3, 0.3, len(found))[torch.randperm(len(found), generator=torch.Generator().manual_seed(3))]
        return 1 + (found - 1) * 6 if names[0].endswith("norm.weight") else found * 20


class Widened:
    """The same as plain float64 numbers."""

    dtype = torch.float64

    def __init__(self, weights: RandomWeights) -> None:
        self._weights, self.device = weights, weights.device

    def matrix(self, *names: str) -> Any:
        found = self._weights.matrix(*names)
        return dequantize(found, torch.float64)[0] if isinstance(found, Tiles) else found.double()

    def vector(self, *names: str) -> Any:
        found = self._weights.vector(*names)
        return None if found is None else found.double()

    def experts(self, layer: int, *parts: str) -> Any:
        found = self._weights.experts(layer, *parts)
        assert isinstance(found, Tiles)
        return dequantize(found, torch.float64)


@cache
def weights_of(name: str) -> tuple[ModelSpec, RandomWeights, Decoder]:
    config, group = MODELS[name]
    spec = describe(config)
    weights = Lively(spec, rules(spec), quant=scheme("int4", group), dtype=torch.bfloat16, tiled=True)
    assert weights.tiled and not unsupported(spec)
    return spec, weights, Decoder(spec, Widened(weights))  # type: ignore[arg-type]
