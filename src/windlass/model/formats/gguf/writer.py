"""The header of a GGUF file (version 3): metadata and tensor positions, as bytes. Knows no model. `header` reads it."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, cast

from windlass.core.model import Frozen
from windlass.model.formats.gguf.header import DEFAULT_ALIGNMENT, MAGIC, TYPES

VERSION = 3
NUMBERS = {block.name: number for number, block in TYPES.items()}
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY, _UINT64 = 4, 5, 6, 7, 8, 9, 10


class GgufOutput(Frozen):
    """A tensor to write; shape slowest dimension first."""

    name: str
    shape: tuple[int, ...]
    type: str

    @property
    def num_bytes(self) -> int:
        block = TYPES[NUMBERS[self.type]]
        return prod(self.shape) // block.elements * block.num_bytes


def padded(num_bytes: int, alignment: int = DEFAULT_ALIGNMENT) -> int:
    return -(-num_bytes // alignment) * alignment


def header_bytes(metadata: Mapping[str, Any], tensors: Sequence[GgufOutput]) -> bytes:
    """Up to the first tensor's data, padding included. Tensors follow in this order, each padded to the alignment."""
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_string(key), _value(value)]
    offset = 0
    for tensor in tensors:
        parts += [_string(tensor.name), struct.pack("<I", len(tensor.shape))]
        parts += [
            struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape)),
            struct.pack("<IQ", NUMBERS[tensor.type], offset),
        ]
        offset += padded(tensor.num_bytes)
    made = b"".join(parts)
    return made + b"\0" * (padded(len(made)) - len(made))


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    kind = _kind(value)
    if kind != _ARRAY:
        return struct.pack("<I", kind) + _scalar(value, kind)
    items = cast(list[Any], value)
    inner = max((_kind(item) for item in items), default=_STRING)
    inner = _INT32 if inner == _UINT32 else inner  # llama.cpp takes token types in no other
    return struct.pack("<IIQ", _ARRAY, inner, len(items)) + b"".join(_scalar(item, inner) for item in items)


def _kind(value: Any) -> int:
    match value:
        case bool():
            return _BOOL
        case int():
            return _INT32 if value < 0 else _UINT32 if value < 2**32 else _UINT64
        case float():
            return _FLOAT32
        case str():
            return _STRING
        case _:
            return _ARRAY


def _scalar(value: Any, kind: int) -> bytes:
    codes = {_UINT32: "I", _INT32: "i", _FLOAT32: "f", _BOOL: "?", _UINT64: "Q"}
    return _string(value) if kind == _STRING else struct.pack(f"<{codes[kind]}", value)
