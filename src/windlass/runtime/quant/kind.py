"""The packing formats of stored matrices, one row per scheme."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from windlass.core.scheme import Stored
from windlass.errors import BadInput


@dataclass(frozen=True)
class PackingKind:
    name: str
    format: str
    """As compressed-tensors calls it."""
    codes_per_word: int
    """Codes in an int32 along the input; 1: codes are elements of their own."""
    offset: int
    """Added to a code to store it."""
    codes_dtype: torch.dtype
    codes_suffix: str
    """Name of the codes' tensor in a checkpoint, after the module's."""


INT4 = PackingKind("int4", "pack-quantized", 8, 8, torch.int32, "weight_packed")
INT8 = PackingKind("int8", "pack-quantized", 4, 128, torch.int32, "weight_packed")
FP8 = PackingKind("fp8", "float-quantized", 1, 0, torch.float8_e4m3fn, "weight")


def kind_of(stored: Stored) -> PackingKind:
    """Eight bits with a four-byte scale per row are fp8; other scales have two bytes."""
    match stored:
        case Stored(bits=4, group=int(), scale_bytes=2):
            return INT4
        case Stored(bits=8, group=None, scale_bytes=4, zero_points=False):
            return FP8
        case Stored(bits=8, scale_bytes=2, zero_points=False):
            return INT8
        case _:
            raise BadInput(
                f"no packing format for {stored.bits} bits, group {stored.group}, {stored.scale_bytes}-byte scales"
                f"{', zero points' if stored.zero_points else ''}; supported are int4 in groups, int8, and fp8 per row"
            )
