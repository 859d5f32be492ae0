"""A ModelSpec as GGUF metadata and tensor names: the inverse of `config` and `names`. Data; no torch.

Only architectures that `names` reads; what their keys cannot express raises Impossible.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from windlass.core.model import Attention, BandScaling, Dense, Frozen, ModelSpec, MoE, Rope, Scoring
from windlass.errors import Impossible
from windlass.model.families.gguf.config import SIGMOID, SOFTMAX, band_factors
from windlass.model.families.gguf.names import ARCHITECTURES, GgufArchitecture, HeadHalves

_LAYER = re.compile(r"model\.layers\.(?P<layer>\d+)\.(?P<rest>.+)")
_EXPERT = re.compile(r"(?P<before>.+\.experts\.)(?P<expert>\d+)(?P<after>\..+)")
_ALIASES = {"mistral": "llama"}
"""model_type -> the architecture that llama.cpp's converter gives it."""


class GgufTarget(Frozen):
    """Where a Hugging Face tensor goes."""

    name: str
    expert: int | None = None
    order: HeadHalves | None = None


def write_architecture(spec: ModelSpec) -> tuple[str, GgufArchitecture]:
    wanted = _ALIASES.get(spec.family, spec.family)
    for name, found in ARCHITECTURES.items():
        if found.model_type == wanted:
            return name, found
    known = ", ".join(sorted(found.model_type for found in ARCHITECTURES.values()))
    raise Impossible(f"GGUF files of {spec.family} models cannot be written; supported: {known}")


def target_of(name: str, spec: ModelSpec) -> GgufTarget:
    """`model.layers.3.self_attn.q_proj.weight` -> `blk.3.attn_q.weight`."""
    _, architecture = write_architecture(spec)
    in_layer = _LAYER.fullmatch(name)
    if in_layer is None:
        return GgufTarget(
            name=_renamed(name, {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}, name)
        )
    rest, expert = in_layer["rest"], None
    if found := _EXPERT.fullmatch(rest):
        rest, expert = f"{found['before']}{{expert}}{found['after']}", int(found["expert"])
    if rest == "mlp.gate.e_score_correction_bias":
        return GgufTarget(name=f"blk.{in_layer['layer']}.exp_probs_b.bias")
    made = f"blk.{in_layer['layer']}.{_renamed(rest, architecture.layers, name)}"
    rotated = architecture.halved_heads and (".attn_q." in made or ".attn_k." in made)
    return GgufTarget(name=made, expert=expert, order=HeadHalves(head_dim=attention(spec).head_dim) if rotated else None)


def _renamed(name: str, stems: Mapping[str, str], whole: str) -> str:
    stem, _, ending = name.rpartition(".")
    found = next((ours for ours, theirs in stems.items() if theirs == stem), None)
    if found is None:
        raise Impossible(f"tensor {whole} has no name in GGUF")
    return f"{found}.{ending}"


def attention(spec: ModelSpec) -> Attention:
    mixers = {layer.mixer for layer in spec.layers}
    mixer = next(iter(mixers))
    if len(mixers) > 1 or not isinstance(mixer, Attention):
        raise Impossible(f"GGUF keys describe one kind of attention for all layers; {spec.name} has others")
    return mixer


def metadata_of(spec: ModelSpec) -> dict[str, Any]:
    """All but the tokenizer and the file type."""
    name, _ = write_architecture(spec)
    mixer = attention(spec)
    next_token = int(spec.next_token is not None)
    values: dict[str, Any] = {
        "block_count": spec.num_layers + next_token,
        "context_length": spec.context_tokens,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": _dense_width(spec),
        "attention.head_count": mixer.num_heads,
        "attention.head_count_kv": mixer.num_kv_heads,
        "attention.key_length": mixer.head_dim,
        "attention.value_length": mixer.head_dim,
        "attention.layer_norm_rms_epsilon": float(spec.norm.eps),
        "vocab_size": spec.vocab_size,
        **_rope(spec),
        **({"attention.sliding_window": mixer.window} if mixer.window else {}),
        **_experts(spec, next_token),
    }
    return {
        "general.architecture": name,
        "general.name": spec.name,
        "general.quantization_version": 2,
        **{f"{name}.{key}": value for key, value in values.items()},
    }


def _dense_width(spec: ModelSpec) -> int:
    dense = next((layer.feed_forward.intermediate_size for layer in spec.layers if isinstance(layer.feed_forward, Dense)), None)
    if dense is not None:
        return dense
    assert spec.experts is not None
    return spec.experts.intermediate_size


def _rope(spec: ModelSpec) -> dict[str, Any]:
    rope = spec.positions
    if not isinstance(rope, Rope):
        raise Impossible(f"GGUF files are written with rotary positions only; {spec.name} has others")
    if rope.scaling is not None and not isinstance(rope.scaling, BandScaling):
        raise Impossible(f"GGUF files are written with plain or Llama 3 rotary scaling; {spec.name} has another")
    return {"rope.freq_base": float(rope.theta), "rope.dimension_count": rope.rotary_dim}


def rope_factors(spec: ModelSpec) -> list[float]:
    """The tensor rope_freqs.weight, which llama.cpp divides the frequencies by; empty: they are not scaled."""
    rope = spec.positions
    if not isinstance(rope, Rope) or not isinstance(rope.scaling, BandScaling):
        return []
    found = rope.scaling
    scaling = {
        "factor": found.factor,
        "low_freq_factor": found.low_freq_factor,
        "high_freq_factor": found.high_freq_factor,
        "original_max_position_embeddings": found.original_context_tokens,
    }
    return band_factors(rope.rotary_dim, rope.theta, scaling)


def _experts(spec: ModelSpec, next_token: int) -> dict[str, Any]:
    moe = spec.experts
    if moe is None:
        return {}
    return {
        "expert_count": moe.num_experts,
        "expert_used_count": moe.num_active,
        "expert_feed_forward_length": moe.intermediate_size,
        **(_sigmoid(spec, moe, next_token) if moe.router.scoring is Scoring.SIGMOID else {"expert_gating_func": SOFTMAX}),
        "expert_weights_norm": moe.router.renormalize,
    }


def _sigmoid(spec: ModelSpec, moe: MoE, next_token: int) -> dict[str, Any]:
    shared = (moe.shared_intermediate_size or 0) // moe.intermediate_size
    leading = next((index for index, layer in enumerate(spec.layers) if isinstance(layer.feed_forward, MoE)), 0)
    return {
        "expert_gating_func": SIGMOID,
        "expert_shared_count": shared,
        "leading_dense_block_count": leading,
        "expert_weights_scale": float(moe.router.scale),
        "expert_group_count": moe.router.num_groups,
        "expert_group_used_count": moe.router.num_chosen_groups,
        "nextn_predict_layers": next_token,
    }
