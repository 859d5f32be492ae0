"""How numbers are stored: bits, groups, and where packed weights may be cut. Knows no model and packs nothing itself.

A scheme is applied to a matrix [out, in]; scales run along `in`. The choice below is the one conversion makes, so that a
plan's bytes are the bytes of the file: a row that the group does not divide takes the largest of 128, 64, 32 that does,
else the matrix stays in high precision.
"""

from __future__ import annotations

from enum import Enum

from windlass.core.model import Frozen
from windlass.errors import BadInput, UnknownName

GROUPS = (128, 64, 32)
KV_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0}


class Keep(Enum):
    """What a scheme may do to a tensor."""

    QUANTIZE = "quantize"
    """A matrix that every scheme packs."""
    EXPERT = "expert"
    """A routed expert's matrix; some schemes pack only these."""
    HIGH = "high"
    """Stays in 16 bits: norms, embeddings, routers, biases, the head."""
    FLOAT32 = "float32"
    """Stays in 32 bits: a router's correction bias."""


class Stored(Frozen):
    """How one matrix is stored after the scheme has looked at its shape."""

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
        """A cut along `dim` (0 out, 1 in) may only fall on a multiple of this many elements.

        Inputs: whole groups. Outputs: compressed-tensors packs zero points eight to an int32 along the output.
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
    # Microscaling FP4: 32 values share a one-byte exponent (OCP MX 1.0); published checkpoints pack the experts only.
    "mxfp4": Scheme(name="mxfp4", bits=4, group=32, scale_bytes=1, only_experts=True),
}
SCHEME_NAMES = tuple(_SCHEMES)


def scheme(name: str, group: int | None = None, kv: str = "bf16", zero_points: bool = False) -> Scheme:
    """The named scheme; `group` changes the group of those that have one."""
    if name not in _SCHEMES:
        raise UnknownName("quantization", name, _SCHEMES)
    if kv not in KV_BYTES:
        raise UnknownName("KV type", kv, KV_BYTES)
    found = _SCHEMES[name]
    if group is None or found.group is None or name == "mxfp4":
        group = found.group
    elif group not in GROUPS:
        raise BadInput(f"group {group} is not one of {', '.join(map(str, GROUPS))}: kernels exist for these only")
    import msgspec

    return msgspec.structs.replace(found, group=group, kv=kv, zero_points=zero_points and found.bits < 8)
