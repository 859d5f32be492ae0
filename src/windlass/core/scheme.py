"""Quantization schemes: bits, group size, and where quantized weights may be split. Knows no model and quantizes nothing itself.

A scheme applies to a matrix [out, in], with groups along `in`. Conversion uses the same rules, so planned bytes equal file bytes: a
matrix whose row length is not a multiple of the group uses the largest of 128, 64, 32 that divides it, else it stays in 16 bits.
"""

from __future__ import annotations

from enum import Enum

from windlass.core.model import Frozen, ModelSpec, kv_bytes_per_token
from windlass.errors import BadInput, UnknownName

GROUPS = (128, 64, 32)
KV_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0625, "int4": 0.5625}
"""Per element; the integers with a 16-bit scale for every 32 (q8_0 and q4_0), for planning other engines."""
KV_VECTOR_BYTES = {"fp8": 1.0}
"""Per key and per value of a token and head: fp8 has a power of two for each (runtime/kernels/fp8_cache.py). vLLM has none, and is planned so too."""


def kv_token_bytes(spec: ModelSpec, kv: str) -> int:
    """What a token takes in a KV cache of that type, all layers, unsplit."""
    return kv_bytes_per_token(spec, KV_BYTES[kv], KV_VECTOR_BYTES.get(kv, 0))


class Keep(Enum):
    """Which precision a tensor gets under a scheme."""

    QUANTIZE = "quantize"
    """A matrix that every scheme quantizes."""
    EXPERT = "expert"
    """A routed expert's matrix; some schemes quantize only these."""
    HIGH = "high"
    """Stays in 16 bits: norms, embeddings, routers, biases, the head."""
    FLOAT32 = "float32"
    """Stays in 32 bits: a router's correction bias."""


class Stored(Frozen):
    """How one matrix is stored, given its shape."""

    bits: int
    group: int | None = None
    """Inputs that share a scale; None: one scale per row, or none at all at 16 bits and above."""
    scale_bytes: int = 0
    zero_points: bool = False

    def matrix_bytes(self, num_out: int, num_in: int) -> int:
        """Bytes of codes, scales and zero points of a [num_out, num_in] matrix."""
        num_groups = num_in // self.group if self.group else 1
        zeros = -(-num_out * self.bits // 32) * 4 * num_groups if self.zero_points else 0
        return num_out * num_in * self.bits // 8 + num_out * num_groups * self.scale_bytes + zeros

    def quantum(self, dim: int) -> int:
        """A split along `dim` (0 out, 1 in) must be at a multiple of this many elements.

        Inputs: whole groups. Outputs: compressed-tensors packs eight 4-bit zero points per int32 along the output.
        """
        if dim == 1:
            return self.group or 1
        return 32 // self.bits if self.zero_points else 1


class Scheme(Frozen):
    name: str
    bits: int
    group: int | None = None
    kv: str = "bf16"
    zero_points: bool = False
    scale_bytes: int = 0
    only_experts: bool = False
    quantize_head: bool = False
    quantize_embedding: bool = False
    """The embedding as well: GGUF files."""

    @property
    def bits_per_weight(self) -> float:
        """With its scales."""
        return self.bits + (8 * self.scale_bytes / self.group if self.group else 0.0)

    @property
    def is_grid(self) -> bool:
        """Codes of several weights are looked up in a grid: IQ1 to IQ3 of GGUF."""
        return self.name.removeprefix("ud_").startswith(("iq1", "iq2", "iq3"))

    @property
    def kv_element_bytes(self) -> float:
        return KV_BYTES[self.kv]

    @property
    def kv_vector_bytes(self) -> float:
        return KV_VECTOR_BYTES.get(self.kv, 0)

    def stored(self, keep: Keep, num_in: int, is_head: bool = False, is_lookup: bool = False) -> Stored:
        """How a matrix with rows of `num_in` is stored. `is_lookup`: it is an embedding."""
        if keep is Keep.FLOAT32 or self.name == "fp32":
            return Stored(bits=32)
        packs = self.quantize_embedding if is_lookup else self._packs(keep, is_head)
        if self.bits >= 16 or not packs:
            return Stored(bits=16)
        if self.group is None:
            return Stored(bits=self.bits, scale_bytes=self.scale_bytes)
        for group in (self.group, *(smaller for smaller in GROUPS if smaller < self.group)):
            if num_in % group == 0:
                return Stored(bits=self.bits, group=group, scale_bytes=self.scale_bytes, zero_points=self.zero_points)
        return Stored(bits=16)

    def _packs(self, keep: Keep, is_head: bool) -> bool:
        if is_head:
            return self.quantize_head
        return keep is Keep.EXPERT or (keep is Keep.QUANTIZE and not self.only_experts)


_SCHEMES = {
    "fp32": Scheme(name="fp32", bits=32),
    "bf16": Scheme(name="bf16", bits=16),
    "fp8": Scheme(name="fp8", bits=8, scale_bytes=4),
    "int8": Scheme(name="int8", bits=8, group=128, scale_bytes=2),
    "int4": Scheme(name="int4", bits=4, group=128, scale_bytes=2),
    # Microscaling FP4: 32 values share a one-byte exponent (OCP MX 1.0); published checkpoints quantize the experts only.
    "mxfp4": Scheme(name="mxfp4", bits=4, group=32, scale_bytes=1, only_experts=True),
}
SCHEME_NAMES = tuple(_SCHEMES)
"""What conversion writes and the engine holds."""


def _blocks(name: str, bits: int, group: int, extra_bytes: int) -> Scheme:
    """A GGUF type: `extra_bytes` of scales, minima and high bits per block of `group` weights."""
    return Scheme(name=name, bits=bits, group=group, scale_bytes=extra_bytes, quantize_head=True, quantize_embedding=True)


# Block types of GGUF (ggml's type table): whole bytes of a block less its whole bits. iq: codebooks; the rest is scales.
_BLOCK_TYPES = {
    "q4_0": (4, 32, 2), "q4_1": (4, 32, 4), "q5_0": (5, 32, 2), "q5_1": (5, 32, 4), "q8_0": (8, 32, 2),
    "q2_k": (2, 256, 20), "q3_k": (3, 256, 14), "q4_k": (4, 256, 16), "q5_k": (5, 256, 16), "q6_k": (6, 256, 18),
    "iq1_s": (1, 256, 18), "iq1_m": (1, 256, 24), "iq2_xxs": (2, 256, 2), "iq2_xs": (2, 256, 10), "iq2_s": (2, 256, 18),
    "iq3_xxs": (3, 256, 2), "iq3_s": (3, 256, 14), "iq4_xs": (4, 256, 8), "iq4_nl": (4, 32, 2),
}  # fmt: skip
_MIXED_FILES = {
    "q2_k_s": 2.99, "q3_k_s": 3.64, "q3_k_m": 4.00, "q3_k_l": 4.30, "q3_k_xl": 4.40, "q4_k_s": 4.67, "q4_k_m": 4.89, "q5_k_s": 5.57,
    "q5_k_m": 5.70, "iq2_m": 2.93, "iq3_xs": 3.50, "iq3_m": 3.76, "ud_q2_k_xl": 2.97, "ud_q4_k_xl": 4.9,
}  # fmt: skip
"""Bits per weight of files that mix types (llama.cpp tools/quantize README, Llama-3.1-8B; ud_*: Unsloth's files of large mixtures, recalled).
The head's and the embedding's share is in the mean."""


def mixed_file(name: str, bits_per_weight: float, group: int = 256) -> Scheme:
    """Of a file that mixes types: whole bits in blocks of `group`, which divides its rows, and the rest as scales."""
    bits = int(bits_per_weight)
    return _blocks(name, bits, group, round((bits_per_weight - bits) * group / 8))


_PLANNED = {
    **{name: _blocks(name, *shape) for name, shape in _BLOCK_TYPES.items()},
    **{name: mixed_file(name, bits) for name, bits in _MIXED_FILES.items()},
    "int3": Scheme(name="int3", bits=3, group=128, scale_bytes=2),
    "int5": Scheme(name="int5", bits=5, group=128, scale_bytes=2),
    "int6": Scheme(name="int6", bits=6, group=128, scale_bytes=2),
    # 16 values share an 8-bit float (NVIDIA ModelOpt, Blackwell); the tensor's own scale is nothing.
    "nvfp4": Scheme(name="nvfp4", bits=4, group=16, scale_bytes=1),
    "awq": Scheme(name="awq", bits=4, group=128, scale_bytes=2, zero_points=True),
    "gptq": Scheme(name="gptq", bits=4, group=128, scale_bytes=2, zero_points=True),
}
GGUF_NAMES = frozenset({*_BLOCK_TYPES, *_MIXED_FILES})
PLANNED_NAMES = tuple(_PLANNED)
"""What published files hold and other engines run: for planning."""


def scheme(name: str, group: int | None = None, kv: str = "bf16", zero_points: bool = False) -> Scheme:
    """The named scheme; `group` overrides the group size of grouped schemes."""
    name = name.lower().replace("-", "_")
    if name in _PLANNED:
        return _planned(name, group, kv)
    if name not in _SCHEMES:
        raise UnknownName("quantization", name, (*_SCHEMES, *_PLANNED))
    if kv not in KV_BYTES:
        raise UnknownName("KV type", kv, KV_BYTES)
    found = _SCHEMES[name]
    if group is None or found.group is None or name == "mxfp4":
        group = found.group
    elif group not in GROUPS:
        raise BadInput(f"group size {group} is not supported; choose {', '.join(map(str, GROUPS))}")
    import msgspec

    return msgspec.structs.replace(found, group=group, kv=kv, zero_points=zero_points and found.bits < 8)


def _planned(name: str, group: int | None, kv: str) -> Scheme:
    """Block sizes belong to the format; awq and gptq take the group size."""
    if kv not in KV_BYTES:
        raise UnknownName("KV type", kv, KV_BYTES)
    import msgspec

    found = _PLANNED[name]
    chosen = group if name in ("awq", "gptq", "int3", "int5", "int6") and group in GROUPS else found.group
    return msgspec.structs.replace(found, group=chosen, kv=kv)
