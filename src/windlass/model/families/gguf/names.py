"""Maps GGUF tensors to Hugging Face names, rows and row order. Data; no torch.

GGUF has its own names (llama.cpp, gguf-py/gguf/tensor_mapping.py), stacks all experts of a layer in one tensor, and for `llama`
permutes the rows of Q and K.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod

from windlass.core.model import Frozen
from windlass.errors import BadInput
from windlass.model.families.reading.config import MAX_EXPERTS


class HeadHalves(Frozen):
    """Row order of rotated heads. Hugging Face pairs dimension i of a head with i + head_dim / 2; llama.cpp's `llama` stores
    such pairs side by side (convert_hf_to_gguf.py, `permute`)."""

    head_dim: int

    def stored(self, row: int) -> int:
        """Row in the file of row `row` of the Hugging Face tensor."""
        head, within = divmod(row, self.head_dim)
        half, index = divmod(within, self.head_dim // 2)
        return head * self.head_dim + 2 * index + half


class GgufSource(Frozen):
    name: str
    """In a Hugging Face checkpoint."""
    stored: str
    """In the file."""
    shape: tuple[int, ...]
    first_row: int = 0
    """First row of this expert in a stacked tensor."""
    order: HeadHalves | None = None


class GgufArchitecture(Frozen):
    model_type: str
    hf_class: str
    layers: dict[str, str]
    """GGUF -> Hugging Face names in a layer, without `blk.N.` and `.weight` or `.bias`; `{expert}` marks stacked experts."""
    halved_heads: bool = False
    """Rows of Q and K are in HeadHalves order."""


_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_NEXT_TOKEN = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
_FFN_NORM = {"ffn_norm": "post_attention_layernorm"}
_CORRECTION = ("exp_probs_b.bias", "mlp.gate.e_score_correction_bias")
"""The only name whose suffix changes."""

ARCHITECTURES = {
    "llama": GgufArchitecture(
        model_type="llama", hf_class="LlamaForCausalLM", layers=_ATTENTION | _FFN_NORM | _DENSE, halved_heads=True
    ),
    "qwen3": GgufArchitecture(
        model_type="qwen3", hf_class="Qwen3ForCausalLM", layers=_ATTENTION | _HEAD_NORMS | _FFN_NORM | _DENSE
    ),
    "qwen3moe": GgufArchitecture(
        model_type="qwen3_moe",
        hf_class="Qwen3MoeForCausalLM",
        layers=_ATTENTION | _HEAD_NORMS | _FFN_NORM | _EXPERTS,
    ),
    "glm4moe": GgufArchitecture(
        model_type="glm4_moe",
        hf_class="Glm4MoeForCausalLM",
        # The norm before the feed-forward has a different name here.
        layers=_ATTENTION
        | _HEAD_NORMS
        | {"post_attention_norm": "post_attention_layernorm"}
        | _DENSE
        | _EXPERTS
        | _SHARED_EXPERT
        | _NEXT_TOKEN,
    ),
}

# Derived tables: rotation frequencies (read for the config) and, in old files, their cosines.
DERIVED = re.compile(r"(blk\.\d+\.)?(rope_freqs|attn_rot_embd)\.weight")
_LAYER_NAME = re.compile(r"blk\.(?P<layer>\d{1,4})\.(?P<rest>.+)")
_NAME = re.compile(r"(?P<stem>.+)\.(?P<ending>weight|bias)")


def architecture_of(metadata: Mapping[str, object], where: str = "GGUF") -> tuple[str, GgufArchitecture]:
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise BadInput(f"{where}: architecture {name!r:.60} is not supported in GGUF; supported: {', '.join(ARCHITECTURES)}")
    return name, ARCHITECTURES[name]


def gguf_sources(
    architecture: GgufArchitecture, shapes: Mapping[str, tuple[int, ...]], head_dim: int, where: str = "GGUF"
) -> Iterator[GgufSource]:
    """Every tensor of the model. `shapes`: of the stored tensors, slowest dimension first."""
    for stored, shape in shapes.items():
        if not DERIVED.fullmatch(stored):
            name = _hugging_face_name(architecture, stored, where)
            if "{expert}" in name:
                yield from _experts(name, stored, shape, where)
            else:
                order = _row_order(architecture, stored, shape, head_dim, where)
                yield GgufSource(name=name, stored=stored, shape=shape, order=order)


def _hugging_face_name(architecture: GgufArchitecture, stored: str, where: str) -> str:
    """Unknown tensors are refused, since they may change the computation."""
    in_layer = _LAYER_NAME.fullmatch(stored)
    rest = in_layer["rest"] if in_layer else stored
    prefix = f"model.layers.{int(in_layer['layer'])}." if in_layer else ""
    if in_layer and rest == _CORRECTION[0] and "ffn_gate_inp" in architecture.layers:
        return prefix + _CORRECTION[1]
    name = _NAME.fullmatch(rest)
    stem = (architecture.layers if in_layer else _MODEL).get(name["stem"]) if name else None
    if name is None or stem is None:
        raise BadInput(f"{where}: tensor {stored!r:.80} is unknown for {architecture.model_type} models")
    return f"{prefix}{stem}.{name['ending']}"


def _experts(name: str, stored: str, shape: tuple[int, ...], where: str) -> Iterator[GgufSource]:
    if len(shape) != 3 or shape[0] > MAX_EXPERTS:
        raise BadInput(
            f"{where}: tensor {stored} should hold at most {MAX_EXPERTS} experts in three dimensions, found {list(shape)}"
        )
    rows = prod(shape[1:-1])
    for expert in range(shape[0]):
        yield GgufSource(name=name.format(expert=expert), stored=stored, shape=shape[1:], first_row=expert * rows)


def _row_order(
    architecture: GgufArchitecture, stored: str, shape: tuple[int, ...], head_dim: int, where: str
) -> HeadHalves | None:
    if not architecture.halved_heads or (".attn_q." not in stored and ".attn_k." not in stored):
        return None
    if head_dim % 2 or shape[0] % head_dim:
        raise BadInput(f"{where}: the {shape[0]} rows of {stored} are not a multiple of head_dim {head_dim}")
    return HeadHalves(head_dim=head_dim)
