"""The container of Distributed Llama's `.m` files: a header of integer pairs, then tensors without names, gaps or padding.

Knows keys, number types and bytes, but not which tensors a model has or their order (`families.dllama.names`). The layout is
that of Distributed Llama 0.16 (src/llm.cpp, converter/writer.py); see docs/reference/formats.md.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from windlass.core.model import Frozen
from windlass.errors import BadCheckpoint, UnknownName

MAGIC = 0x0A00ABCD
OLD_MAGICS = (0xABCD00, 0xABCD01)
"""Headers without keys, before 2024-05; no longer supported by Distributed Llama."""

STOCK_KEYS = {
    "version": 0,
    "arch_type": 1,
    "dim": 2,
    "hidden_dim": 3,
    "n_layers": 4,
    "n_heads": 5,
    "n_kv_heads": 6,
    "n_experts": 7,
    "n_active_experts": 8,
    "vocab_size": 9,
    "max_seq_len": 10,
    "hidden_act": 11,
    "rope_theta": 12,
    "weights_float_type": 13,
    "rope_scaling_factor": 14,
    "rope_scaling_low_freq_factor": 15,
    "rope_scaling_high_freq_factory": 16,
    "rope_scaling_orig_max_seq_len": 17,
    "rope_type": 18,
    "head_dim": 19,
    "norm_epsilon": 20,
    "moe_hidden_dim": 21,
}
"""Distributed Llama's names and numbers. It refuses files with unknown keys."""

OWN_KEYS = {
    "rotary_dim": 0x574C4D10,
    "qkv_bias": 0x574C4D11,
    "qk_norm": 0x574C4D12,
    "n_shared_experts": 0x574C4D13,
    "first_dense_layers": 0x574C4D14,
    "norm_topk": 0x574C4D15,
    "routed_scaling_low": 0x574C4D16,
    "routed_scaling_high": 0x574C4D17,
    "n_groups": 0x574C4D18,
    "n_chosen_groups": 0x574C4D19,
}
"""Windlass extensions ("WLM" and a number); see docs/reference/formats.md."""

KEYS = STOCK_KEYS | OWN_KEYS
_NAMES = {number: name for name, number in KEYS.items()}

SIGNED = frozenset({"routed_scaling_low", "routed_scaling_high"})
"""Halves of a float64, so any 32 bits are valid. All other values are non-negative."""

_PREFIX = struct.Struct("<ii")
_MAX_PAIRS = 1024
"""There are 32 keys without repetition; anything beyond this limit is a damaged file."""


class WeightType(Enum):
    """Number type of a tensor. Blocks are 32 consecutive elements of a row."""

    F32 = 0
    F16 = 1
    Q40 = 2
    """A block is an fp16 scale and 16 bytes of two 4-bit codes: 18 bytes, laid out as Q4_0."""
    Q80 = 3
    """A block is an fp16 scale and 32 int8 codes: 34 bytes, laid out as Q8_0."""

    @property
    def block(self) -> int:
        return 32 if self in (WeightType.Q40, WeightType.Q80) else 1

    @property
    def block_bytes(self) -> int:
        return {WeightType.F32: 4, WeightType.F16: 2, WeightType.Q40: 18, WeightType.Q80: 34}[self]

    def row_bytes(self, width: int) -> int:
        return width // self.block * self.block_bytes


def weight_type(name: str) -> WeightType:
    """`q40`, `q80`, `f32` or `f16`, as Distributed Llama's converter names them."""
    known = {member.name.lower(): member for member in WeightType}
    if name.lower() not in known:
        raise UnknownName("weight type", name, known)
    return known[name.lower()]


class DllamaHeader(Frozen):
    values: dict[str, int]
    """By name; only keys present in the file."""
    num_bytes: int
    """Offset of the first tensor."""
    file_bytes: int


def header_bytes(values: Mapping[str, int]) -> bytes:
    """A header with these values, in this order."""
    pairs = b"".join(_PREFIX.pack(KEYS[name], value) for name, value in values.items())
    return _PREFIX.pack(MAGIC, _PREFIX.size + len(pairs)) + pairs


def read_header(path: Path) -> DllamaHeader:
    try:
        with path.open("rb") as stream:
            file_bytes = os.fstat(stream.fileno()).st_size
            num_bytes = _read_prefix(path, stream.read(_PREFIX.size), file_bytes)
            body = stream.read(num_bytes - _PREFIX.size)
    except OSError as error:
        raise BadCheckpoint(f"cannot be read: {error.strerror}", path) from None
    return DllamaHeader(values=_read_pairs(path, body), num_bytes=num_bytes, file_bytes=file_bytes)


def _read_prefix(path: Path, prefix: bytes, file_bytes: int) -> int:
    if len(prefix) < _PREFIX.size:
        raise BadCheckpoint(f"{file_bytes} bytes are too short for a Distributed Llama model", path, offset=len(prefix))
    magic, num_bytes = _PREFIX.unpack(prefix)
    if magic in OLD_MAGICS:
        raise BadCheckpoint(
            "old header format without keys, which Distributed Llama no longer supports either; convert the model again",
            path,
            offset=0,
        )
    if magic != MAGIC:
        raise BadCheckpoint(
            f"not a Distributed Llama model: it starts with {magic & 0xFFFFFFFF:#x}, not {MAGIC:#x}", path, offset=0
        )
    if num_bytes % 8 or not 8 <= num_bytes <= min(file_bytes, 8 + 8 * _MAX_PAIRS):
        raise BadCheckpoint(f"the header claims {num_bytes} bytes of a {file_bytes}-byte file", path, offset=4)
    return num_bytes


def _read_pairs(path: Path, body: bytes) -> dict[str, int]:
    values: dict[str, int] = {}
    for index, (key, value) in enumerate(_PREFIX.iter_unpack(body[: len(body) // 8 * 8])):
        offset = _PREFIX.size * (index + 1)
        name = _NAMES.get(key)
        if name is None:
            raise BadCheckpoint(
                f"unknown header key {key}; Distributed Llama has 0 to {max(STOCK_KEYS.values())}", path, offset=offset
            )
        if name in values:
            raise BadCheckpoint(f"header key {key} ({name}) appears twice", path, offset=offset)
        if value < 0 and name not in SIGNED:
            raise BadCheckpoint(f"header key {key} ({name}) is {value}; it cannot be negative", path, offset=offset + 4)
        values[name] = value
    return values


def read_weight_type(path: Path, header: DllamaHeader) -> WeightType:
    """Type of the matrices that are not always F32."""
    value = header.values.get("weights_float_type")
    if value is None:
        raise BadCheckpoint("the header does not say how weights are stored (weights_float_type)", path, offset=header.num_bytes)
    known = {member.value: member for member in WeightType}
    if value not in known:
        raise BadCheckpoint(f"unknown weights_float_type {value}; expected 0 to {max(known)}", path)
    return known[value]


# --- row order of Q and K ------------------------------------------------------------------------------------


def to_pairs(rows: Any, head_dim: int) -> Any:
    """Permutes rows of whole heads from rotation of halves (i, i + d/2) to rotation of pairs (2i, 2i + 1). Tensor or array."""
    return rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def to_halves(rows: Any, head_dim: int) -> Any:
    """Inverse of `to_pairs`."""
    return rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
