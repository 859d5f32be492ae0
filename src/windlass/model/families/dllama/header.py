"""ModelSpec -> header values of a Distributed Llama `.m` file, and a header -> config.json.

What integers cannot express (a fractional rope_theta, another epsilon, YaRN) raises Impossible; Distributed Llama's own converter
truncates, which changes the computation. Values go by name; `formats.dllama` has their numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from windlass.core.model import Activation, Attention, BandScaling, Dense, ModelSpec, MoE, Rope
from windlass.errors import BadConfig, Impossible
from windlass.model.families.dllama.names import ARCHITECTURES, DllamaArchitecture, architecture

_ACTIVATIONS = {Activation.GELU: 0, Activation.SILU: 1}
_ACTIVATION_NAMES = {0: "gelu", 1: "silu"}
_EPSILONS = {1e-5: 5, 1e-6: 6}
_EPSILON_VALUES = {code: value for value, code in _EPSILONS.items()}
ROPE_PAIRS, ROPE_HALVES, ROPE_BANDS = 0, 1, 2
"""`rope_type`: llama, falcon, llama3.1 (llama with scaled frequencies)."""
_INT32_MAX = 2**31 - 1


def header_values(spec: ModelSpec, config: Mapping[str, Any]) -> dict[str, int]:
    """Header values by name, in the order of Distributed Llama's converter, all but `weights_float_type` (0 here)."""
    kind, mixer = architecture(spec), _attention(spec)
    activation = spec.layers[0].feed_forward.activation
    if activation not in _ACTIVATIONS:
        raise Impossible(f"activation {activation.value} cannot be stored in a Distributed Llama header; only gelu and silu can")
    values = {
        "version": 0,
        "arch_type": kind.number,
        "hidden_act": _ACTIVATIONS[activation],
        "dim": spec.hidden_size,
        "hidden_dim": _dense_width(spec, config),
        "n_layers": spec.num_layers,
        "n_heads": mixer.num_heads,
        "n_kv_heads": mixer.num_kv_heads,
        "weights_float_type": 0,
        "max_seq_len": min(spec.context_tokens, mixer.window or spec.context_tokens, _INT32_MAX),
        "vocab_size": spec.vocab_size,
        "n_experts": spec.experts.num_experts if spec.experts else 0,
        "n_active_experts": spec.experts.num_active if spec.experts else 0,
        **_rope_values(spec, kind, mixer),
        "head_dim": mixer.head_dim,
        "norm_epsilon": _epsilon(spec),
    }
    if spec.experts is not None:
        values["moe_hidden_dim"] = spec.experts.intermediate_size
        values |= _own_values(spec, spec.experts, mixer) if kind.own else _check_stock_experts(spec, spec.experts)
    return values


def _attention(spec: ModelSpec) -> Attention:
    mixers = {layer.mixer for layer in spec.layers}
    mixer = next(iter(mixers))
    if len(mixers) > 1 or not isinstance(mixer, Attention):
        raise Impossible(
            "Distributed Llama files support one kind of attention for all layers; this model has several. Use --to hf"
        )
    return mixer


def _dense_width(spec: ModelSpec, config: Mapping[str, Any]) -> int:
    """Unused by models without dense layers, but required in the header; taken from the config."""
    dense = next((layer.feed_forward for layer in spec.layers if isinstance(layer.feed_forward, Dense)), None)
    return dense.intermediate_size if dense is not None else int(config.get("intermediate_size") or 0)


def _epsilon(spec: ModelSpec) -> int:
    if spec.norm.eps not in _EPSILONS:
        raise Impossible(
            f"rms_norm_eps {spec.norm.eps:g} cannot be stored in a Distributed Llama header; only 1e-05 and 1e-06 can"
        )
    return _EPSILONS[spec.norm.eps]


def _whole(name: str, value: float) -> int:
    if value != int(value) or not 0 <= value <= _INT32_MAX:
        raise Impossible(f"{name} {value:g} is not an integer below 2^31, as a Distributed Llama header requires. Use --to hf")
    return int(value)


def _rope_values(spec: ModelSpec, kind: DllamaArchitecture, mixer: Attention) -> dict[str, int]:
    rope = spec.positions
    if not isinstance(rope, Rope) or rope.interleaved or (rope.rotary_dim != mixer.head_dim and not kind.own):
        raise Impossible(
            f"Distributed Llama files of {kind.model_type} models need RoPE over whole heads; this one differs. Use --to hf"
        )
    values = {"rope_theta": _whole("rope_theta", rope.theta)}
    if rope.scaling is None:
        return values
    if not isinstance(rope.scaling, BandScaling) or not kind.pairs:
        raise Impossible("Distributed Llama files support no RoPE scaling except Llama 3.1's, in Llama models. Use --to hf")
    return values | {
        "rope_scaling_factor": _whole("rope scaling factor", rope.scaling.factor),
        "rope_scaling_low_freq_factor": _whole("low_freq_factor", rope.scaling.low_freq_factor),
        "rope_scaling_high_freq_factory": _whole("high_freq_factor", rope.scaling.high_freq_factor),
        "rope_scaling_orig_max_seq_len": rope.scaling.original_context_tokens,
        "rope_type": ROPE_BANDS,
    }


def _check_stock_experts(spec: ModelSpec, experts: MoE) -> dict[str, int]:
    if len(spec.moe_layers) < spec.num_layers:
        raise Impossible(
            "Distributed Llama files have experts in every layer or in none; this model mixes dense and MoE layers. Use --to hf"
        )
    if not experts.router.renormalize:
        raise Impossible(
            "Distributed Llama always renormalises the expert weights; this model has norm_topk_prob false. Use --to hf"
        )
    return {}


def _own_values(spec: ModelSpec, experts: MoE, mixer: Attention) -> dict[str, int]:
    assert isinstance(spec.positions, Rope)
    first = sum(isinstance(layer.feed_forward, Dense) for layer in spec.layers)
    if any(isinstance(layer.feed_forward, Dense) for layer in spec.layers[first:]):
        raise Impossible(
            "the header only supports dense layers at the start; this model has dense layers after MoE layers. Use --to hf"
        )
    low, high = struct.unpack("<ii", struct.pack("<d", experts.router.scale))
    return {
        "rotary_dim": spec.positions.rotary_dim,
        "qkv_bias": int(mixer.qkv_bias),
        "qk_norm": int(mixer.qk_norm),
        "n_shared_experts": experts.shared_intermediate_size // experts.intermediate_size,
        "first_dense_layers": first,
        "norm_topk": int(experts.router.renormalize),
        "routed_scaling_low": low,
        "routed_scaling_high": high,
        "n_groups": experts.router.num_groups,
        "n_chosen_groups": experts.router.num_chosen_groups,
    }


# --- reading --------------------------------------------------------------------------------------------------------


class _HeaderValues:
    """Header values by name; missing or unsupported ones raise BadConfig."""

    def __init__(self, values: Mapping[str, int], where: str) -> None:
        self._values, self._where = values, where

    def __call__(self, name: str, default: int | None = None) -> int:
        value = self._values.get(name, default)
        if value is None:
            raise self.refuse(f"{name} is missing")
        return value

    def refuse(self, message: str) -> BadConfig:
        return BadConfig(f"{self._where}: {message}")

    def among(self, name: str, known: Mapping[int, Any], default: int) -> Any:
        value = self(name, default)
        if value not in known:
            raise self.refuse(f"{name} is {value}; supported: {', '.join(map(str, known))}")
        return known[value]


def config_from(values: Mapping[str, int], where: str = "header") -> dict[str, Any]:
    """A config.json for `families.describe`. The head is never tied: the file stores it separately quantized."""
    read = _HeaderValues(values, where)
    kind: DllamaArchitecture = read.among("arch_type", {known.number: known for known in ARCHITECTURES}, -1)
    read.among("version", {0: 0}, 0)
    heads, num_experts = read("n_heads"), read("n_experts", 0)
    if not heads:
        raise read.refuse("n_heads is 0")
    config: dict[str, Any] = {
        "architectures": [kind.class_name],
        "model_type": kind.model_type,
        "hidden_size": read("dim"),
        "num_hidden_layers": read("n_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": read("n_kv_heads"),
        "head_dim": read("head_dim", 0) or read("dim") // heads,
        "vocab_size": read("vocab_size"),
        "max_position_embeddings": read("max_seq_len"),
        "hidden_act": read.among("hidden_act", _ACTIVATION_NAMES, 1),
        "rms_norm_eps": read.among("norm_epsilon", _EPSILON_VALUES, 5),
        "rope_theta": float(read("rope_theta", 10000)),
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    if width := read("hidden_dim", 0):
        config["intermediate_size"] = width
    if bool(num_experts) != (kind.own or kind.model_type == "qwen3_moe"):
        raise read.refuse(f"{num_experts} experts in a {kind.model_type} model")
    config |= _rope_config(read, kind)
    config |= _own_config(read, config["head_dim"]) if kind.own else _experts_config(read, num_experts)
    return config


def _rope_config(read: _HeaderValues, kind: DllamaArchitecture) -> dict[str, Any]:
    """Distributed Llama rotates halves in all architectures except its first, whatever the header says."""
    default = ROPE_PAIRS if kind.pairs else ROPE_HALVES
    rope = read("rope_type", default)
    if rope not in ((ROPE_PAIRS, ROPE_BANDS) if kind.pairs else (ROPE_PAIRS, ROPE_HALVES)):
        raise read.refuse(f"rope_type {rope} is not supported for {kind.model_type} models")
    if rope != ROPE_BANDS:
        return {}
    scaling = {
        "rope_type": "llama3",
        "factor": float(read("rope_scaling_factor", 1)),
        "low_freq_factor": float(read("rope_scaling_low_freq_factor", 0)),
        "high_freq_factor": float(read("rope_scaling_high_freq_factory", 0)),
        "original_max_position_embeddings": read("rope_scaling_orig_max_seq_len", 0),
    }
    return {"rope_scaling": scaling}


def _experts_config(read: _HeaderValues, num_experts: int) -> dict[str, Any]:
    if not num_experts:
        return {}
    width = read("moe_hidden_dim")
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": read("n_active_experts"),
        "moe_intermediate_size": width,
        "intermediate_size": read("hidden_dim", 0) or width,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    }


def _own_config(read: _HeaderValues, head_dim: int) -> dict[str, Any]:
    flags = {0: False, 1: True}
    (scale,) = struct.unpack("<d", struct.pack("<ii", read("routed_scaling_low"), read("routed_scaling_high")))
    if not head_dim:
        raise read.refuse("head_dim is 0")
    return {
        "partial_rotary_factor": read("rotary_dim") / head_dim,
        "attention_bias": read.among("qkv_bias", flags, -1),
        "use_qk_norm": read.among("qk_norm", flags, -1),
        "n_routed_experts": read("n_experts"),
        "num_experts_per_tok": read("n_active_experts"),
        "moe_intermediate_size": read("moe_hidden_dim"),
        "n_shared_experts": read("n_shared_experts"),
        "first_k_dense_replace": read("first_dense_layers"),
        "norm_topk_prob": read.among("norm_topk", flags, -1),
        "routed_scaling_factor": scale,
        "n_group": read("n_groups"),
        "topk_group": read("n_chosen_groups"),
        "num_nextn_predict_layers": 0,
    }
