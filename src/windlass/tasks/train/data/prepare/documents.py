"""Reads documents from files: texts and chats, with their location. Knows file formats, no tokens."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from windlass.errors import BadInput
from windlass.tasks.train.data.prepare.inputs import FileSpan
from windlass.tasks.train.data.prepare.parquet import read_rows
from windlass.tasks.train.data.prepare.plain_text import NotText, decoded, signature

TEXT, MESSAGES, TOOLS = "text", "messages", "tools"
_BLOCK_BYTES = 1 << 20


class Document(NamedTuple):
    place: str
    text: str = ""
    messages: list[dict[str, Any]] | None = None
    """A chat, rendered by the chat template."""
    tools: list[dict[str, Any]] | None = None


class BadRecord(NamedTuple):
    """A record that could not be read."""

    place: str
    why: str


def read_documents(piece: FileSpan, field: str | None) -> Iterator[Document | BadRecord]:
    """`field`: the field with the text; None: `messages` if present, else `text`."""
    path = Path(piece.path)
    try:
        if piece.kind == "text":
            yield _whole_file(path)
        elif piece.kind == "jsonl":
            yield from _json_lines(piece, path, field)
        else:
            for row, values in read_rows(path, piece.start, piece.stop, [field] if field else [MESSAGES, TEXT, TOOLS]):
                place = f"{path}, row {row + 1}"
                yield BadRecord(place, values) if isinstance(values, str) else _document(values, place, field)
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def _whole_file(path: Path) -> Document | BadRecord:
    try:
        return Document(str(path), decoded(path.read_bytes()))
    except NotText as error:
        return BadRecord(str(path), str(error))


def _json_lines(piece: FileSpan, path: Path, field: str | None) -> Iterator[Document | BadRecord]:
    packed = _packed(path)
    if packed is not None:
        yield BadRecord(
            str(path), f"is {packed} data, not JSON, from byte 0; unpack it first, or name it .jsonl.gz if it is gzip"
        )
        return
    for offset, line in _lines(piece, path):
        if not line.strip():
            continue
        place = f"{path}, byte {offset}"
        try:
            values = msgspec.json.decode(line.removeprefix(b"\xef\xbb\xbf"))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            yield BadRecord(place, f"not JSON: {error}")
            continue
        yield _document(values, place, field)


def _packed(path: Path) -> str | None:
    """The format of a file that is no JSON although it is called so."""
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as stream:
        return signature(stream.read(8))


def _lines(piece: FileSpan, path: Path) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of lines that begin in the span."""
    if path.suffix == ".gz":
        with gzip.open(path, "rb") as stream:
            offset = 0
            for line in stream:
                yield offset, line
                offset += len(line)
        return
    with path.open("rb", buffering=_BLOCK_BYTES) as stream:
        offset = piece.start
        if offset:  # a line that begins before the span belongs to the previous span
            stream.seek(offset - 1)
            offset += len(stream.readline()) - 1
        while offset < piece.stop and (line := stream.readline()):
            yield offset, line
            offset += len(line)


def _document(values: Any, place: str, field: str | None) -> Document | BadRecord:
    if not isinstance(values, dict):
        return BadRecord(place, "not an object")
    record = cast(dict[str, Any], values)
    name = field or (MESSAGES if record.get(MESSAGES) is not None else TEXT)
    value = record.get(name)
    if isinstance(value, str):
        return Document(place, value)
    if isinstance(value, list):
        return _chat(cast(list[Any], value), record.get(TOOLS), place)
    if value is None:
        had = ", ".join(list(record)[:8]) or "nothing"
        return BadRecord(place, f"has no {field or 'text or messages'}; its fields are {had}")
    return BadRecord(place, f"{name} is neither a string nor a list of messages")


def _chat(messages: list[Any], tools: Any, place: str) -> Document | BadRecord:
    if not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages):
        return BadRecord(place, "messages must be objects with a role")
    # Parquet gives every message the fields of all messages; empty ones were absent.
    chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
    return Document(place, messages=chat, tools=tools if isinstance(tools, list) else None)


def line_number(path: Path, offset: int) -> int:
    """Of the line at this offset; computed only for errors."""
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as stream:
        lines, left = 1, offset
        while left and (block := stream.read(min(left, _BLOCK_BYTES))):
            lines += block.count(b"\n")
            left -= len(block)
    return lines
