"""The table of pre-tokenizers (pretokenizers.toml), read once."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

from windlass.core.model import Frozen
from windlass.errors import UnknownName


class PreTokenizer(Frozen):
    names: tuple[str, ...]
    patterns: tuple[str, ...]
    """Regular expressions, applied in order to the pieces of the previous one."""
    ignore_merges: bool = False
    add_bos: bool = False
    normalizer: str = ""


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(files("windlass.model.text.tokenize").joinpath("pretokenizers.toml").read_text(encoding="utf-8"))


@cache
def pre_tokenizers() -> dict[str, PreTokenizer]:
    patterns = _table()["patterns"]
    found: dict[str, PreTokenizer] = {}
    for row in msgspec.convert(_table()["pre"], list[PreTokenizer], strict=True):
        resolved = msgspec.structs.replace(row, patterns=tuple(patterns[name] for name in row.patterns))
        found |= dict.fromkeys(row.names, resolved)
    return found


def pre_tokenizer(name: str) -> PreTokenizer:
    if name not in pre_tokenizers():
        raise UnknownName("pre-tokenizer (tokenizer.ggml.pre)", name, [known for known in pre_tokenizers() if known])
    return pre_tokenizers()[name]


def vocabulary_kind(model: str) -> str:
    """`bytes` or `sentencepiece`, from tokenizer.ggml.model."""
    kinds: dict[str, str] = _table()["models"]
    if model not in kinds:
        raise UnknownName("vocabulary (tokenizer.ggml.model)", model, kinds)
    return kinds[model]


def vocabulary_model(kind: str) -> str:
    """The value of tokenizer.ggml.model for a kind of vocabulary: the first of the table."""
    kinds: dict[str, str] = _table()["models"]
    return next(model for model, found in kinds.items() if found == kind)
