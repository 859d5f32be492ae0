"""GGUF metadata -> an equivalent config.json for `families.describe`.

Keys are those of llama.cpp (gguf-py/gguf/constants.py); unread keys of the architecture are refused by name.
What the metadata omits is derived from the tensors: tied head, biases, QK norms, MTP layer.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from windlass.errors import BadInput
from windlass.model.families.gguf.names import architecture_of
from windlass.model.families.reading.config import MAX_CONTEXT, MAX_EXPERTS, MAX_LAYERS, Config

Shapes = Mapping[str, tuple[int, ...]]

SOFTMAX, SIGMOID = 1, 2
"""expert_gating_func (gguf-py/gguf/constants.py, ExpertGatingFuncType)."""

# Without influence on the computation, or redundant with the tensors.
_HARMLESS = ("vocab_size", "tensor_data_layout", "use_parallel_residual", "rope.scaling.finetuned", "attention.causal")

# Parameters of the frequency table of Llama 3.1 to 3.3; only the factor differs, and can be derived from the table.
_BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def gguf_config(
    metadata: Mapping[str, Any], shapes: Shapes, rope_factors: Sequence[float] = (), where: str = "GGUF"
) -> dict[str, Any]:
    """`shapes`: of the stored tensors; `rope_factors`: the tensor rope_freqs.weight, if present."""
    name, architecture = architecture_of(metadata, where)
    prefix = f"{name}."
    keys = Config({key[len(prefix) :]: value for key, value in metadata.items() if key.startswith(prefix)}, f"{where}: {name}")
    keys.ignore(*_HARMLESS)
    config: dict[str, Any] = {"architectures": [architecture.hf_class], "model_type": architecture.model_type}
    config |= _common(keys, shapes)
    config |= _rope(keys, config["head_dim"], config["rope_theta"], rope_factors)
    config |= _EXTRA[name](keys, config, shapes)
    keys.finish()
    return config | _tokens(metadata, where)


def _common(keys: Config, shapes: Shapes) -> dict[str, Any]:
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", default=max(hidden // heads, 1))
    keys.expect("attention.value_length", head_dim)
    embedding = shapes.get("token_embd.weight", ())
    if len(embedding) != 2 or embedding[1] != hidden:
        raise keys.refuse(f"token_embd.weight should be [vocabulary, {hidden}], found {list(embedding)}")
    return {
        "hidden_size": hidden,
        "num_hidden_layers": keys.integer("block_count", high=MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", default=heads, high=heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length", high=MAX_CONTEXT),
        "rms_norm_eps": _shortest(keys.number("attention.layer_norm_rms_epsilon", high=1.0)),
        "rope_theta": _shortest(keys.number("rope.freq_base", default=10000.0, low=1.0)),
        "hidden_act": "silu",
        "vocab_size": embedding[0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
    }


def _shortest(value: float) -> float:
    """The shortest decimal with the same float32 value: 1e-05 is stored as 9.999999747378752e-06."""
    stored = struct.pack("<f", value)
    for digits in range(6, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == stored:
            return short
    return value


# --- rotary positions


def _rope(keys: Config, head_dim: int, theta: float, factors: Sequence[float]) -> dict[str, Any]:
    rotated = keys.integer("rope.dimension_count", default=head_dim, high=head_dim)
    found: dict[str, Any] = {} if rotated == head_dim else {"partial_rotary_factor": rotated / head_dim}
    scaling = _scaling(keys)
    if factors:
        if scaling is not None:
            raise keys.refuse("rope_freqs.weight and rope.scaling are both given; only one is supported")
        scaling = _bands(keys, rotated, theta, factors)
    return found | ({"rope_scaling": scaling} if scaling else {})


def _scaling(keys: Config) -> dict[str, Any] | None:
    kind = keys.choice("rope.scaling.type", among={name: name for name in ("none", "linear", "yarn")}, default="none")
    keys.expect("rope.scaling.attn_factor", 1.0)
    factor = _shortest(keys.number("rope.scaling.factor", "rope.scale_linear", default=1.0, low=1e-3, high=1e6))
    original = keys.integer("rope.scaling.original_context_length", default=0, low=0, high=MAX_CONTEXT)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    found: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    if original:
        found["original_max_position_embeddings"] = original
    for key in ("beta_fast", "beta_slow"):
        if f"rope.scaling.yarn_{key}" in keys.values:
            found[key] = _shortest(keys.number(f"rope.scaling.yarn_{key}"))
    return found


def _bands(keys: Config, rotated: int, theta: float, factors: Sequence[float]) -> dict[str, Any] | None:
    """llama.cpp stores the divisor of each frequency; the config has the parameters it was computed from."""
    scaling = {"rope_type": "llama3", "factor": _shortest(max(factors)), **_BANDS}
    expected = band_factors(rotated, theta, scaling)
    close = len(expected) == len(factors) and all(
        math.isclose(*pair, rel_tol=1e-4) for pair in zip(expected, factors, strict=True)
    )
    if not close:
        raise keys.refuse("rope_freqs.weight is not Llama 3's frequency scaling, the only one supported")
    return scaling if scaling["factor"] != 1.0 else None


def band_factors(rotated: int, theta: float, scaling: Mapping[str, Any]) -> list[float]:
    """transformers, modeling_rope_utils.py, _compute_llama3_parameters."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    found: list[float] = []
    for index in range(0, rotated, 2):
        turns = scaling["original_max_position_embeddings"] / (2 * math.pi * theta ** (index / rotated))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        found.append(1 / ((1 - smooth) / factor + smooth))
    return found


# --- per architecture

_Found = dict[str, Any]


def _dense(keys: Config, config: _Found, shapes: Shapes) -> _Found:
    if keys.integer("expert_count", default=0, low=0, high=MAX_EXPERTS) > 0:
        raise keys.refuse("Mixtral in GGUF is not supported; use the safetensors checkpoint")
    keys.ignore("expert_used_count")
    found: _Found = {"intermediate_size": keys.integer("feed_forward_length")}
    window = keys.optional_integer("attention.sliding_window", high=MAX_CONTEXT)
    return found if window is None else found | {"sliding_window": window}


def _mixture(keys: Config) -> _Found:
    num_experts = keys.integer("expert_count", high=MAX_EXPERTS)
    width = keys.integer("expert_feed_forward_length")
    return {
        "moe_intermediate_size": width,
        "intermediate_size": keys.integer("feed_forward_length", default=width),
        "num_experts_per_tok": keys.integer("expert_used_count", high=num_experts),
        # llama.cpp renormalises in both architectures by default (src/models/qwen3moe.cpp, glm4-moe.cpp)
        "norm_topk_prob": keys.flag("expert_weights_norm", default=True),
    }


def _softmax_mixture(keys: Config, config: _Found, shapes: Shapes) -> _Found:
    keys.expect("expert_gating_func", SOFTMAX)
    keys.expect("expert_weights_scale", 1.0)
    keys.expect("expert_shared_count", 0)
    found = _mixture(keys)
    return found | {"num_experts": keys.integer("expert_count"), "decoder_sparse_step": 1, "mlp_only_layers": []}


def _sigmoid_mixture(keys: Config, config: _Found, shapes: Shapes) -> _Found:
    keys.expect("expert_gating_func", SIGMOID)
    found = _mixture(keys)
    claimed = keys.integer("nextn_predict_layers", default=0, low=0, high=1)
    layers = config["num_hidden_layers"] - claimed  # block_count includes the MTP layer
    if layers < 1:
        raise keys.refuse("block_count leaves no layer beside the MTP layer")
    # Some files claim an MTP layer without having its weights (llama.cpp issue 19733).
    present = claimed and f"blk.{layers}.nextn.eh_proj.weight" in shapes
    return found | {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": int(bool(present)),
        "n_routed_experts": keys.integer("expert_count"),
        "n_shared_experts": keys.integer("expert_shared_count", default=0, low=0, high=1024),
        "first_k_dense_replace": keys.integer("leading_dense_block_count", default=0, low=0, high=layers),
        "routed_scaling_factor": _shortest(keys.number("expert_weights_scale", default=1.0)),
        "n_group": keys.integer("expert_group_count", default=1),
        "topk_group": keys.integer("expert_group_used_count", default=1),
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in shapes,
    }


_EXTRA = {"llama": _dense, "qwen3": _dense, "qwen3moe": _softmax_mixture, "glm4moe": _sigmoid_mixture}


# --- tokens


def _tokens(metadata: Mapping[str, Any], where: str) -> dict[str, Any]:
    """EOS, end-of-turn and end-of-message tokens all stop generation; GLM needs all three."""
    found: dict[str, Any] = {}
    for key, name in (("bos_token_id", "bos_token_id"), ("padding_token_id", "pad_token_id")):
        if (value := _token(metadata, key, where)) is not None:
            found[name] = value
    stops = [_token(metadata, f"{kind}_token_id", where) for kind in ("eos", "eot", "eom")]
    unique = list(dict.fromkeys(stop for stop in stops if stop is not None))
    if unique:
        found["eos_token_id"] = unique[0] if len(unique) == 1 else unique
    return found


def _token(metadata: Mapping[str, Any], key: str, where: str) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BadInput(f"{where}: tokenizer.ggml.{key} should be a token id, found {value!r:.40}")
    return value
