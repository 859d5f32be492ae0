"""Quantization schemes: bits, group size, and where quantized weights may be split. Knows no model and quantizes nothing itself.

A scheme applies to a matrix [out, in], with groups along `in`. Conversion uses the same rules, so planned bytes equal file bytes: a
matrix whose row length is not a multiple of the group uses the largest of 128, 64, 32 that divides it, else it stays in 16 bits.
"""

from __future__ import annotations

from enum import Enum

from windlass.core.model import Frozen
from windlass.errors import BadInput, UnknownName

GROUPS = (128, 64, 32)
KV_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0}


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

    @property
    def kv_element_bytes(self) -> float:
        return KV_BYTES[self.kv]

    def stored(self, keep: Keep, num_in: int, is_head: bool = False) -> Stored:
        """How a matrix with rows of `num_in` is stored."""
        if keep is Keep.FLOAT32 or self.name == "fp32":
            return Stored(bits=32)
        if self.bits >= 16 or not self._packs(keep, is_head):
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


def scheme(name: str, group: int | None = None, kv: str = "bf16", zero_points: bool = False) -> Scheme:
    """The named scheme; `group` overrides the group size of grouped schemes."""
    if name not in _SCHEMES:
        raise UnknownName("quantization", name, _SCHEMES)
    if kv not in KV_BYTES:
        raise UnknownName("KV type", kv, KV_BYTES)
    found = _SCHEMES[name]
    if group is None or found.group is None or name == "mxfp4":
        group = found.group
    elif group not in GROUPS:
        raise BadInput(f"group size {group} is not supported; choose {', '.join(map(str, GROUPS))}")
    import msgspec

    return msgspec.structs.replace(found, group=group, kv=kv, zero_points=zero_points and found.bits < 8)
