"""Distributed Llama's `.t` tokenizer file: a header of integer pairs, the chat template, stop ids, then the vocabulary as bytes.

The layout is that of src/tokenizer.cpp and converter/tokenizer-writer.py of Distributed Llama 0.16 (docs/reference/formats.md). It has no
merges: Distributed Llama merges the pair of tokens whose result has the highest score.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from windlass.core.constants import DECODE_ERRORS
from windlass.core.model import Frozen
from windlass.errors import BadCheckpoint, BadInput

MAGIC = 0x567124
OLD_MAGIC = 0x567123
"""Followed by five integers instead of pairs: vocabulary size, longest token, bos, eos, pad. Still read."""

KEYS = {
    "version": 0,
    "vocab_size": 1,
    "max_token_length": 2,
    "bos_id": 3,
    "eos_id": 4,
    "pad_id": 5,
    "chat_eos_id": 6,
    "chat_template": 7,
    "chat_stop": 8,
    "n_eos_tokens": 9,
    "add_bos": 10,
}
_NAMES = {number: name for name, number in KEYS.items()}
VERSION = 1

_PAIR = struct.Struct("<ii")
_TOKEN = struct.Struct("<fI")
_MAX_PAIRS = 1024

# Distributed Llama detects the chat format by these substrings of the template; without one of them it refuses to chat.
CHAT_MARKS = ("[INST]", "<|start_header_id|>", "<｜Assistant｜>", "<|im_start|>")


SPLITTING_COMMENT, _COMMENT_END = "{# windlass: ", " #}"
LEAST_MERGED = -1e10
"""Distributed Llama merges only into tokens with a higher score than this (src/tokenizer.cpp)."""
NEVER_MERGED = -1e30
"""The score that we give to special tokens: no text merges into them, there or here, and they are known by it wherever their ids are."""


class DllamaTokenizer(Frozen):
    vocabulary: list[bytes]
    """Raw bytes by id."""
    scores: list[float]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    chat_template: str = ""
    add_bos: bool = True
    max_token_length: int = 0
    """Bytes of the longest token; 0: compute it."""

    @property
    def own_template(self) -> str:
        """The chat template without our comment."""
        return self.chat_template.partition(SPLITTING_COMMENT)[0]

    @property
    def splitting(self) -> dict[str, Any]:
        """How text is split before it is merged, in the words of tokenizer.json; empty: the file does not say."""
        _, found, rest = self.chat_template.partition(SPLITTING_COMMENT)
        try:
            return msgspec.json.decode(rest.removesuffix(_COMMENT_END), type=dict[str, Any]) if found else {}
        except DECODE_ERRORS:
            return {}


def with_splitting(template: str, splitting: Mapping[str, Any]) -> str:
    """The template, and behind it what the format has no field for: a comment for Jinja, and nothing for Distributed Llama."""
    text = msgspec.json.encode(splitting).decode().replace("#", "\\u0023")  # the comment ends with one
    return f"{template}{SPLITTING_COMMENT}{text}{_COMMENT_END}"


def check(tokenizer: DllamaTokenizer) -> None:
    """Raises BadInput for a tokenizer that cannot be stored or is inconsistent."""
    size = len(tokenizer.vocabulary)
    if not size or len(tokenizer.scores) != size:
        raise BadInput(f"a tokenizer needs one score per token; it has {size} tokens and {len(tokenizer.scores)} scores")
    if b"" in tokenizer.vocabulary:
        raise BadInput(f"token {tokenizer.vocabulary.index(b'')} is empty, which the format cannot store")
    for name, index in (("bos", tokenizer.bos_id), *(("eos", index) for index in tokenizer.eos_ids)):
        if index is not None and not 0 <= index < size:
            raise BadInput(f"{name} id {index} is outside the vocabulary of {size}")


def tokenizer_bytes(tokenizer: DllamaTokenizer) -> bytes:
    check(tokenizer)
    template = tokenizer.chat_template.encode()
    values = {} if tokenizer.bos_id is None else {"bos_id": tokenizer.bos_id}
    values |= {
        "version": VERSION,
        "vocab_size": len(tokenizer.vocabulary),
        "max_token_length": max(tokenizer.max_token_length, *map(len, tokenizer.vocabulary), 1),
    }
    values |= {"chat_template": len(template)} if template else {}
    values |= {"n_eos_tokens": len(tokenizer.eos_ids), "add_bos": int(tokenizer.add_bos)}
    pairs = b"".join(_PAIR.pack(KEYS[name], value) for name, value in values.items())
    stops = struct.pack(f"<{len(tokenizer.eos_ids)}i", *tokenizer.eos_ids)
    tokens = b"".join(
        _TOKEN.pack(score, len(token)) + token for score, token in zip(tokenizer.scores, tokenizer.vocabulary, strict=True)
    )
    return _PAIR.pack(MAGIC, _PAIR.size + len(pairs)) + pairs + template + stops + tokens


def write_tokenizer(path: Path, tokenizer: DllamaTokenizer) -> int:
    """Written under a temporary name until complete; returns its size."""
    data = tokenizer_bytes(tokenizer)
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return len(data)


def read_tokenizer(path: Path) -> DllamaTokenizer:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadCheckpoint(f"cannot be read: {error.strerror}", path) from None
    return _TokenizerReader(path, data).read()


class _TokenizerReader:
    """Sequential reader; anything past the end is refused with its offset."""

    def __init__(self, path: Path, data: bytes) -> None:
        self._path, self._data, self._at = path, data, 0

    def read(self) -> DllamaTokenizer:
        magic = self._integers(1)[0]
        if magic == OLD_MAGIC:
            return self._old()
        if magic != MAGIC:
            raise self._refuse(f"not a Distributed Llama tokenizer: it starts with {magic & 0xFFFFFFFF:#x}", 0)
        values, legacy = self._pairs()
        template = self._text(values.get("chat_template", 0))
        self._take(values.get("chat_stop", 0))  # written by old converters after the template; unused
        stops = self._integers(values.get("n_eos_tokens", 0))
        vocabulary, scores = self._tokens(values.get("vocab_size", 0))
        return self._checked(
            DllamaTokenizer(
                vocabulary=vocabulary,
                scores=scores,
                bos_id=values.get("bos_id"),
                eos_ids=tuple(dict.fromkeys((*legacy, *stops))),
                chat_template=template,
                add_bos=bool(values.get("add_bos", 1)),
                max_token_length=values.get("max_token_length", 0),
            )
        )

    def _old(self) -> DllamaTokenizer:
        size, longest, bos, eos, _ = self._integers(5)
        vocabulary, scores = self._tokens(size)
        return self._checked(
            DllamaTokenizer(
                vocabulary=vocabulary,
                scores=scores,
                bos_id=bos if bos >= 0 else None,
                eos_ids=(eos,) if eos >= 0 else (),
                max_token_length=longest,
            )
        )

    def _pairs(self) -> tuple[dict[str, int], list[int]]:
        """Values by name, and the stop ids of old files."""
        header_bytes = self._integers(1)[0]
        if header_bytes % 8 or not 8 <= header_bytes <= min(len(self._data), 8 + 8 * _MAX_PAIRS):
            raise self._refuse(f"the header claims {header_bytes} bytes of a {len(self._data)}-byte file", 4)
        values: dict[str, int] = {}
        legacy: list[int] = []
        while self._at < header_bytes:
            offset = self._at
            key, value = self._integers(2)
            name = _NAMES.get(key)
            if name is None:
                raise self._refuse(f"unknown header key {key}; expected 0 to {max(_NAMES)}", offset)
            if name in ("eos_id", "chat_eos_id"):
                legacy += [value] if value >= 0 else []
            elif value < 0 and name not in ("bos_id", "pad_id"):
                raise self._refuse(f"header key {key} ({name}) is {value}; it cannot be negative", offset + 4)
            elif value >= 0:
                values[name] = value
        if values.get("version") != VERSION:
            raise self._refuse(f"version {values.get('version')} is not supported; expected {VERSION}", 8)
        return values, legacy

    def _tokens(self, size: int) -> tuple[list[bytes], list[float]]:
        if not 0 < size <= (len(self._data) - self._at) // (_TOKEN.size + 1):
            raise self._refuse(
                f"a vocabulary of {size} does not fit into the remaining {len(self._data) - self._at} bytes", self._at
            )
        vocabulary: list[bytes] = []
        scores: list[float] = []
        for index in range(size):
            offset = self._at
            score, length = _TOKEN.unpack(self._take(_TOKEN.size))
            if not length:
                raise self._refuse(f"token {index} is empty", offset + 4)
            vocabulary.append(self._take(length))
            scores.append(score)
        if self._at != len(self._data):
            raise self._refuse(f"{len(self._data) - self._at} bytes follow the last token", self._at)
        return vocabulary, scores

    def _checked(self, tokenizer: DllamaTokenizer) -> DllamaTokenizer:
        try:
            check(tokenizer)
        except BadInput as error:
            raise self._refuse(str(error), 8) from None
        longest = max(map(len, tokenizer.vocabulary))
        if longest > tokenizer.max_token_length:
            raise self._refuse(f"a token has {longest} bytes, more than the header's {tokenizer.max_token_length}", 8)
        return tokenizer

    def _text(self, length: int) -> str:
        offset = self._at
        try:
            return self._take(length).decode()
        except UnicodeDecodeError:
            raise self._refuse("the chat template is not UTF-8", offset) from None

    def _integers(self, count: int) -> Sequence[int]:
        return struct.unpack(f"<{count}i", self._take(4 * count))

    def _take(self, count: int) -> bytes:
        found = self._data[self._at : self._at + count]
        if len(found) < count:
            raise self._refuse(f"{count} bytes needed, {len(found)} left; the file is truncated", self._at)
        self._at += count
        return found

    def _refuse(self, what: str, offset: int) -> BadCheckpoint:
        return BadCheckpoint(what, self._path, offset=offset)
