"""safetensors dtype names <-> torch dtypes. Imports torch on first use."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from windlass.errors import BadInput

if TYPE_CHECKING:
    import torch


@cache
def _table() -> dict[str, torch.dtype]:
    import torch

    return {
        "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
        "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64,
        "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
        "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
        "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    }  # fmt: skip


@cache
def _names() -> dict[torch.dtype, str]:
    return {dtype: name for name, dtype in _table().items()}


def torch_dtype(name: str) -> torch.dtype:
    if name not in _table():
        raise BadInput(f"dtype {name} is not supported: torch has no equivalent")
    return _table()[name]


def dtype_name(dtype: torch.dtype) -> str:
    if dtype not in _names():
        raise BadInput(f"dtype {dtype} is not supported: safetensors has no equivalent")
    return _names()[dtype]
