"""The vocabulary in a GGUF file: tokens, types, and merges or scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from windlass.core.model import Frozen
from windlass.errors import BadInput
from windlass.model.text.tokenize.pretokenizers import PreTokenizer, pre_tokenizer, vocabulary_kind

NORMAL, UNKNOWN, CONTROL_TYPE, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""tokenizer.ggml.token_type (llama.h, enum llama_token_type)."""
CONTROL = frozenset({UNKNOWN, CONTROL_TYPE})
ADDED = CONTROL | {USER_DEFINED}


Number = TypeVar("Number", int, float)


class GgufVocabulary(Frozen):
    tokens: list[str]
    types: list[int]
    merges: list[tuple[str, str]]
    """Best first."""
    pre: PreTokenizer | None
    """None: SentencePiece, which has no pre-tokenizer."""
    add_bos: bool
    add_eos: bool
    add_space: bool
    """SentencePiece prepends a space to the text."""

    def of_types(self, types: frozenset[int]) -> Iterator[int]:
        return (number for number, kind in enumerate(self.types) if kind in types)

    def numbers(self) -> dict[str, int]:
        """Token -> id, without unused ones, which only pad the table and are not in published tokenizers."""
        return {token: number for number, token in enumerate(self.tokens) if self.types[number] != UNUSED}


def read_vocabulary(metadata: Mapping[str, Any], where: str = "GGUF") -> GgufVocabulary:
    reader = _MetadataReader(metadata, where)
    tokens = reader.strings("tokens")
    if not tokens:
        raise BadInput(f"{where}: the file has no vocabulary (tokenizer.ggml.tokens)")
    types = reader.numbers("token_type", int, len(tokens)) or [NORMAL] * len(tokens)
    by_bytes = vocabulary_kind(reader.string("model")) == "bytes"
    pre = pre_tokenizer(reader.string("pre")) if by_bytes else None
    merges = reader.merges() if by_bytes else _merges_from_scores(reader, tokens, types)
    return GgufVocabulary(
        tokens=tokens,
        types=types,
        merges=merges,
        pre=pre,
        add_bos=reader.flag("add_bos_token", default=pre is None or pre.add_bos),
        add_eos=reader.flag("add_eos_token", default=False),
        add_space=pre is None and reader.flag("add_space_prefix", default=True),
    )


class _MetadataReader:
    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self.metadata, self.where = metadata, where

    def refuse(self, key: str, expected: str) -> BadInput:
        return BadInput(f"{self.where}: tokenizer.ggml.{key} should be {expected}")

    def string(self, key: str) -> str:
        value = self.metadata.get(f"tokenizer.ggml.{key}", "")
        if not isinstance(value, str):
            raise self.refuse(key, "text")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def strings(self, key: str) -> list[str]:
        try:
            return msgspec.convert(self.metadata.get(f"tokenizer.ggml.{key}", []), list[str])
        except msgspec.ValidationError:
            raise self.refuse(key, "a list of strings") from None

    def numbers(self, key: str, kind: type[Number], count: int) -> list[Number]:
        try:
            values = msgspec.convert(self.metadata.get(f"tokenizer.ggml.{key}", []), list[kind])
        except msgspec.ValidationError:
            raise self.refuse(key, "a list of numbers") from None
        if values and len(values) != count:
            raise self.refuse(key, f"{count} numbers, one for each token; it has {len(values)}")
        return values

    def merges(self) -> list[tuple[str, str]]:
        """`left right`: the separating space is never the first character, since a token may start with a space."""
        found: list[tuple[str, str]] = []
        for merge in self.strings("merges"):
            cut = merge.find(" ", 1)
            if cut < 0:
                raise self.refuse("merges", f"pairs separated by a space; {merge!r:.40} is not")
            found.append((merge[:cut], merge[cut + 1 :]))
        return found


def _merges_from_scores(reader: _MetadataReader, tokens: list[str], types: Sequence[int]) -> list[tuple[str, str]]:
    """SentencePiece merges the neighbours whose union has the best score, so every split of a token into two tokens is a merge,
    ranked by the token's score (as in transformers, convert_slow_tokenizer.py)."""
    scores = reader.numbers("scores", float, len(tokens))
    if not scores:
        raise reader.refuse("scores", "present: this vocabulary has no merges")
    number = {token: index for index, token in enumerate(tokens) if types[index] == NORMAL}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, index in number.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in number and right in number:
                ranked.append((-scores[index], number[left], number[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]
