"""Reads the header of a GGUF file: metadata and tensor positions. Reads no weights and knows no model.

Layout (ggml/docs/gguf.md, versions 2 and 3, little endian): magic, version, counts, key-value pairs, tensor infos, padding
to the alignment, tensor data. Every count and length is checked against the remaining bytes and against
generous limits before anything of that size is allocated.
"""

from __future__ import annotations

import struct
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from windlass.core.model import Frozen
from windlass.errors import BadCheckpoint, BadInput
from windlass.foreign import MAX_MESSAGE, shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 2**20
MAX_DIMENSIONS = 4
MAX_NESTING = 4
MAX_STRING_BYTES = 2**24
"""A chat template has a few kilobytes."""
MAX_ITEMS = 2**22
"""Array elements, keys and tensors of a file together: three times a vocabulary of 262,144 with types, scores and merges."""


class BlockType(Frozen):
    """A ggml type: elements and bytes per block."""

    name: str
    elements: int
    num_bytes: int


# ggml type numbers (ggml.h, enum ggml_type). Unsupported ones are listed so that errors can name them.
TYPES: dict[int, BlockType] = {
    number: BlockType(name=name, elements=elements, num_bytes=num_bytes)
    for number, name, elements, num_bytes in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (9, "Q8_1", 32, 40),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
        (41, "Q1_0", 128, 18),
    )
}

# Metadata value types: number -> struct code. 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GgufTensor(Frozen):
    name: str
    shape: tuple[int, ...]
    """Slowest dimension first ([out, in]), as in PyTorch; the file lists the fastest first."""
    type: BlockType
    start: int
    """Byte in the file."""

    @property
    def num_rows(self) -> int:
        """Rows of the last dimension, all leading ones flattened."""
        return prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.type.elements * self.type.num_bytes

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes


class GgufHeader(Frozen):
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    try:
        with path.open("rb", buffering=2**20) as stream:
            return _HeaderReader(stream, path.stat().st_size, path).header()
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}") from None


class _HeaderReader:
    """Sequential reader; `position` is the byte offset for error messages."""

    def __init__(self, stream: BinaryIO, size: int, path: Path) -> None:
        self.stream, self.size, self.path = stream, size, path
        self.position = 0
        self.items_left = MAX_ITEMS

    def refuse(self, message: str, at: int | None = None) -> BadCheckpoint:
        return BadCheckpoint(
            f"{self.path} is not a valid GGUF file: byte {self.position if at is None else at}: {shown(message, MAX_MESSAGE)}"
        )

    def header(self) -> GgufHeader:
        version = self._version()
        num_tensors, num_keys = self.scalar("Q"), self.scalar("Q")
        self.claim(num_keys, "keys", 13)  # a key's length, its value's type, a byte of value
        metadata = self._metadata(num_keys)
        self.claim(num_tensors, "tensors", 32)  # name length, dimensions, one of them, type, offset
        infos = [self._tensor() for _ in range(num_tensors)]
        return GgufHeader(version=version, metadata=metadata, tensors=self._placed(infos, self._alignment(metadata)))

    def _version(self) -> int:
        if (magic := self.take(4)) != MAGIC:
            raise self.refuse(f"it starts with {magic!r}, not {MAGIC!r}", 0)
        version = self.scalar("I")
        if version in VERSIONS:
            return version
        if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
            raise self.refuse("big-endian files are not supported; convert it to little-endian first", 4)
        raise self.refuse(f"version {version} is not supported, only {' and '.join(map(str, VERSIONS))}", 4)

    # --- primitives

    def take(self, count: int) -> bytes:
        if count > self.size - self.position:
            raise self.refuse(f"{count} bytes needed, {self.size - self.position} left; the file is truncated")
        data = self.stream.read(count)
        if len(data) != count:
            raise self.refuse(f"{count} bytes needed, but the file ended; it was truncated while being read")
        self.position += count
        return data

    def scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def claim(self, count: int, what: str, least_bytes: int) -> None:
        """Checks, before allocating, that so many items fit into the rest of the file and the limit."""
        if count * least_bytes > self.size - self.position:
            raise self.refuse(f"{count} {what} do not fit into the remaining {self.size - self.position} bytes")
        if count > self.items_left:
            raise self.refuse(f"{count} {what} exceed the limit of {MAX_ITEMS} items per header")
        self.items_left -= count

    def string(self) -> str:
        at, length = self.position, self.scalar("Q")
        if length > MAX_STRING_BYTES:
            raise self.refuse(f"a string of {length} bytes exceeds the limit of {MAX_STRING_BYTES}", at)
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise self.refuse("a string that is not UTF-8", at) from None

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(depth)
        raise self.refuse(f"value type {kind} is unknown", self.position - 4)

    def _array(self, depth: int) -> list[Any]:
        if depth >= MAX_NESTING:
            raise self.refuse(f"arrays nested more than {MAX_NESTING} deep")
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in _SCALARS:
            code = _SCALARS[kind]
            self.claim(count, "array elements", struct.calcsize(f"<{code}"))
            return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(f"<{code}"))))
        self.claim(count, "array elements", 8)
        return [self.value(kind, depth + 1) for _ in range(count)]

    # --- the two tables

    def _metadata(self, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(count):
            at, key = self.position, self.string()
            if key in found:
                raise self.refuse(f"key {key[:80]!r} appears twice", at)
            found[key] = self.value(self.scalar("I"))
        return found

    def _tensor(self) -> GgufTensor:
        """`start` is still relative to the data section."""
        at, name = self.position, self.string()
        num_dimensions = self.scalar("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self.refuse(f"tensor {name[:80]!r} has {num_dimensions} dimensions; 1 to {MAX_DIMENSIONS} are allowed", at)
        shape = tuple(self.scalar("Q") for _ in range(num_dimensions))[::-1]
        number, start = self.scalar("I"), self.scalar("Q")
        if number not in TYPES:
            raise self.refuse(f"tensor {name[:80]!r} has unknown type {number}", at)
        kind = TYPES[number]
        if min(shape) < 1 or shape[-1] % kind.elements:
            raise self.refuse(
                f"tensor {name[:80]!r} of shape {shape} cannot be stored in {kind.name} blocks of {kind.elements}", at
            )
        return GgufTensor(name=name, shape=shape, type=kind, start=start)

    def _alignment(self, metadata: dict[str, Any]) -> int:
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
            raise self.refuse(f"general.alignment is {value!r:.40}; a power of two is expected")
        return value

    def _placed(self, infos: list[GgufTensor], alignment: int) -> dict[str, GgufTensor]:
        """Tensors by name with absolute positions; checks bounds, alignment and overlaps."""
        data = -(-self.position // alignment) * alignment
        found: dict[str, GgufTensor] = {}
        for info in infos:
            end = data + info.start + info.num_bytes
            if info.name in found:
                raise self.refuse(f"tensor {info.name[:80]!r} appears twice")
            if info.start % alignment:
                raise self.refuse(f"tensor {info.name[:80]!r} starts at {info.start}, which is not a multiple of {alignment}")
            if end > self.size:
                raise self.refuse(
                    f"tensor {info.name[:80]!r} ends at byte {end} of a {self.size}-byte file; the file is truncated"
                )
            found[info.name] = GgufTensor(name=info.name, shape=info.shape, type=info.type, start=data + info.start)
        self._check_overlap(found)
        return found

    def _check_overlap(self, tensors: dict[str, GgufTensor]) -> None:
        last: GgufTensor | None = None
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
            if last is not None and tensor.start < last.start + last.num_bytes:
                raise self.refuse(f"tensors {last.name[:80]!r} and {tensor.name[:80]!r} overlap", tensor.start)
            last = tensor
