"""Reads and validates the header of a safetensors file: every entry is checked against the file size before it is used.

Layout (huggingface.co/docs/safetensors): eight bytes, little endian, with the length of a JSON object; the object, which may be
padded with spaces; then the tensors' bytes without gaps. Knows no directory and no index; reads no weights.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import msgspec

from windlass.core.model import Frozen
from windlass.errors import BadCheckpoint
from windlass.model.formats.disk.tensor_info import TensorInfo

MAX_HEADER_BYTES = 100_000_000
"""The reference implementation's limit; about a million tensors. Bounds the allocation for a damaged length."""

LENGTH_BYTES = 8
METADATA = "__metadata__"

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip

_LARGEST = 2**63 - 1


_Size = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(Frozen, gc=False):
    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


_KEYS_OF_ENTRY = 1 + len(_Entry.__struct_fields__)
_ENTRY = msgspec.json.Decoder(_Entry)
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_STRINGS = msgspec.json.Decoder(dict[str, str])


def read_header(path: Path) -> tuple[TensorInfo, ...]:
    """Every tensor of the file, in file order. Raises BadCheckpoint on any inconsistency."""
    header, file_bytes = read_header_bytes(path)
    entries, num_metadata = _entries(path, header)
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}
    infos = [_info(path, name, raw, header, sizes) for name, raw in entries]
    if header.count(b":") != len(entries) * _KEYS_OF_ENTRY + num_metadata:  # no more colons than distinct keys: none is repeated
        _refuse_repeated_key(path, header)
    infos.sort(key=lambda info: (info.start, info.num_bytes))
    _check_tiling(path, infos, LENGTH_BYTES + len(header), file_bytes)
    return tuple(infos)


def read_header_bytes(path: Path) -> tuple[bytes, int]:
    """The JSON text, unparsed, and the size of the file."""
    try:
        with path.open("rb") as stream:
            file_bytes = os.fstat(stream.fileno()).st_size
            first = stream.read(LENGTH_BYTES)
            if first == b"version ":
                raise BadCheckpoint("a Git LFS pointer instead of the file; run `git lfs pull`", path, offset=0)
            length = int.from_bytes(first, "little")
            _check_length(path, length, file_bytes)
            header = stream.read(length)
    except OSError as error:
        raise BadCheckpoint(f"cannot be read: {error.strerror}", path) from None
    if len(header) < length:
        raise BadCheckpoint("the file ends within its header", path, offset=LENGTH_BYTES + len(header))
    return header, file_bytes


def _check_length(path: Path, length: int, file_bytes: int) -> None:
    if file_bytes < LENGTH_BYTES:
        raise BadCheckpoint(f"not a safetensors file: only {file_bytes} bytes", path, offset=file_bytes)
    if length > file_bytes - LENGTH_BYTES:
        what = f"not a safetensors file, or truncated: its header claims {length} bytes of a {file_bytes}-byte file"
        raise BadCheckpoint(what, path, offset=0)
    if length > MAX_HEADER_BYTES:
        raise BadCheckpoint(f"its header claims {length} bytes; at most {MAX_HEADER_BYTES} are read", path, offset=0)


def _entries(path: Path, header: bytes) -> tuple[list[tuple[str, msgspec.Raw]], int]:
    """Names and unparsed values, and the number of keys of the metadata; Raw keeps a hostile header from becoming a large tree of objects."""
    if not header.startswith(b"{"):
        raise BadCheckpoint("damaged header: not a JSON object", path, offset=LENGTH_BYTES)
    try:
        entries = _OBJECT.decode(header)
        metadata = entries.pop(METADATA, None)
        num_metadata = 0 if metadata is None else 1 + len(_STRINGS.decode(metadata))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadCheckpoint(f"damaged header: {error}", path, offset=LENGTH_BYTES) from None
    return list(entries.items()), num_metadata


def _info(path: Path, name: str, raw: msgspec.Raw, header: bytes, sizes: dict[tuple[str, tuple[int, ...]], int]) -> TensorInfo:
    """`sizes`: bytes of a dtype and shape, filled as they occur; there are few."""
    try:
        entry = _ENTRY.decode(raw)
        start, stop = entry.data_offsets
        form = entry.dtype, entry.shape
        num_bytes = sizes[form] if form in sizes else sizes.setdefault(form, _num_bytes(entry))
        if start > stop:
            raise ValueError(f"its bytes begin at {start} and end at {stop}")
        if stop - start != num_bytes:
            raise ValueError(f"{_shown(entry)} needs {num_bytes} bytes, its offsets give it {stop - start}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        reason = " ".join(str(error).split())  # names in the file may hold line breaks
        raise BadCheckpoint(f"damaged header: {reason}", path, name, _place_of(name, header)) from None
    first = LENGTH_BYTES + len(header) + start
    return TensorInfo(name=name, dtype=entry.dtype, shape=entry.shape, file=path, start=first, num_bytes=num_bytes)


def _num_bytes(entry: _Entry) -> int:
    bits = DTYPE_BITS.get(entry.dtype)
    if bits is None:
        raise ValueError(f"unknown dtype {entry.dtype[:40]!r}")
    for size in entry.shape:
        bits *= size
        if max(bits, size) > _LARGEST:  # checked per factor, so that the product stays small
            raise ValueError(f"its shape of {len(entry.shape)} dimensions overflows")
    if bits % 8:
        raise ValueError(f"{_shown(entry)} is not a whole number of bytes")
    return bits // 8


def _shown(entry: _Entry) -> str:
    sizes = [str(size) for size in entry.shape[:8]] + ["..."] * (len(entry.shape) > 8)
    return f"{entry.dtype} of shape [{', '.join(sizes)}]"


def _place_of(name: str, header: bytes) -> int:
    """Byte offset of the entry, or of the header if its name is escaped."""
    return LENGTH_BYTES + max(header.find(f'"{name}"'.encode("utf-8", "replace")), 0)


def _check_tiling(path: Path, infos: list[TensorInfo], first: int, file_bytes: int) -> None:
    """Tensors must cover the file from the header to its end without gaps or overlaps."""
    expected = first
    for info in infos:
        if info.start + info.num_bytes > file_bytes:
            what = f"ends at byte {info.start + info.num_bytes} of a {file_bytes}-byte file: the file is truncated"
            raise BadCheckpoint(what, path, info.name, info.start)
        if info.start != expected:
            what = f"overlaps {expected - info.start} bytes of" if info.start < expected else "leaves a gap after"
            raise BadCheckpoint(f"{what} the tensor before it, which ends at byte {expected}", path, info.name, info.start)
        expected += info.num_bytes
    if expected != file_bytes:
        what = f"{file_bytes - expected} unused bytes after the last tensor"
        raise BadCheckpoint(what, path, infos[-1].name if infos else "", expected)


# --- duplicate keys --------------------------------------------------------------------------------------------------


def repeated_key(text: bytes) -> str | None:
    """A duplicate key in the JSON text, if any: parsers differ in which one they use, so two readers could see different tensors.

    Parses the (already validated) text again, since msgspec does not report duplicates.
    """
    repeated: list[str] = []

    def check(pairs: list[tuple[str, Any]]) -> None:
        if len({name for name, _ in pairs}) < len(pairs):
            names = [name for name, _ in pairs]
            repeated.append(next(name for name in names if names.count(name) > 1))

    json.loads(text.decode(), object_pairs_hook=check)
    return repeated[0] if repeated else None


def _refuse_repeated_key(path: Path, header: bytes) -> None:
    try:
        name = repeated_key(header)
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"damaged header: {error}", path, offset=LENGTH_BYTES) from None
    if name is not None:
        raise BadCheckpoint("is listed twice in the header", path, name, _place_of(name, header))
