"""Which block type each tensor of a GGUF file gets. Pure. The mixture of Q4_K_M is llama.cpp's (src/llama-quant.cpp)."""

from __future__ import annotations

import re

from windlass.model.formats.gguf.header import TYPES
from windlass.model.formats.gguf.writer import NUMBERS

FILE_TYPES = {"Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15, "F16": 1}
"""general.file_type (llama.h, enum llama_ftype)."""
MAIN = {"Q4_0": "Q4_0", "Q8_0": "Q8_0", "Q4_K_M": "Q4_K", "F16": "F16"}
FALLBACK = "Q8_0"
"""For rows that are not whole blocks of 256; of 32 if even that does not divide them: F16."""
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_MORE_BITS = ("attn_v.weight", "ffn_down.weight", "ffn_down_exps.weight")


def block_type(name: str, shape: tuple[int, ...], kind: str, num_layers: int, tied_head: bool) -> str:
    """`kind`: a key of FILE_TYPES. Vectors, routers and frequencies stay F32."""
    if len(shape) == 1 or "ffn_gate_inp" in name or not name.endswith(".weight"):
        return "F32"
    return _that_divides(_wanted(name, kind, num_layers, tied_head), shape[-1])


def _wanted(name: str, kind: str, num_layers: int, tied_head: bool) -> str:
    if name == "output.weight" or (name == "token_embd.weight" and tied_head):
        return {"Q4_0": "Q8_0", "Q4_K_M": "Q6_K"}.get(kind, MAIN[kind])  # the head decides on near-ties
    found = _LAYER.fullmatch(name)
    if kind == "Q4_K_M" and found and found[2] in _MORE_BITS and _is_sensitive(int(found[1]), num_layers):
        return "Q6_K"
    return MAIN[kind]


def _is_sensitive(layer: int, num_layers: int) -> bool:
    """llama.cpp's use_more_bits: the first and last eighth, and every third layer between."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def _that_divides(wanted: str, num_in: int) -> str:
    for name in (wanted, FALLBACK):
        if num_in % TYPES[NUMBERS[name]].elements == 0:
            return name
    return "F16"
