"""tokenizer.json and its companions -> the tokenizer keys of a GGUF file: the inverse of `gguf_tokenizer`. BPE only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from windlass.errors import Impossible
from windlass.model.text.tokenize.gguf_vocabulary import BYTE, CONTROL_TYPE, NORMAL, UNUSED, USER_DEFINED
from windlass.model.text.tokenize.pretokenizers import pre_tokenizers, vocabulary_model

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
UNKNOWN_PRE = "default"

Json = dict[str, Any]


def tokenizer_metadata(
    tokenizer: Mapping[str, Any], config: Mapping[str, Any], vocab_size: int, chat_template: str | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The keys, and warnings. `vocab_size`: rows of the embedding, which may be more than there are tokens."""
    model = cast(Json, tokenizer.get("model") or {})
    if model.get("type") != "BPE":
        raise Impossible(f"GGUF files are written with BPE tokenizers only, and this one is {model.get('type')!r:.40}")
    tokens, types = _tokens(tokenizer, model, vocab_size)
    by_bytes = not model.get("byte_fallback")
    found: dict[str, Any] = {
        "model": vocabulary_model("bytes" if by_bytes else "sentencepiece"),
        "tokens": tokens,
        "token_type": types,
    }
    notes: tuple[str, ...] = ()
    if by_bytes:
        pre, notes = _pre(tokenizer)
        found |= {
            "pre": pre,
            "merges": [one if isinstance(one, str) else " ".join(one) for one in cast(list[str | list[str]], model["merges"])],
        }
    else:
        # SentencePiece merges by score: the earlier a token, the better.
        found |= {"scores": [-float(index) for index in range(len(tokens))], "add_space_prefix": True}
    numbers = {token: index for index, token in enumerate(tokens)}
    found |= {f"{key}_token_id": numbers[text] for name, key in _SPECIAL.items() if (text := _text(config.get(name))) in numbers}
    if isinstance(config.get("add_bos_token"), bool):
        found["add_bos_token"] = config["add_bos_token"]
    if chat_template:
        found["chat_template"] = chat_template
    return {key if key == "tokenizer.chat_template" else _key(key): value for key, value in found.items()}, notes


def _key(name: str) -> str:
    return "tokenizer.chat_template" if name == "chat_template" else f"tokenizer.ggml.{name}"


def _text(value: Any) -> str:
    """`"<s>"`, or `{"content": "<s>", ...}`."""
    if isinstance(value, dict):
        return str(cast(Json, value).get("content", ""))
    return value if isinstance(value, str) else ""


def _tokens(tokenizer: Mapping[str, Any], model: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    added: dict[int, Json] = {one["id"]: one for one in cast(list[Json], tokenizer.get("added_tokens") or [])}
    by_id = {number: text for text, number in cast(dict[str, int], model["vocab"]).items()}
    by_id |= {number: str(one["content"]) for number, one in added.items()}
    if max(by_id) >= vocab_size:
        raise Impossible(f"the tokenizer has token {max(by_id)}, and the model embeds {vocab_size} tokens")
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(vocab_size)]
    return tokens, [_type(number, text, number in by_id, added) for number, text in enumerate(tokens)]


def _type(number: int, text: str, exists: bool, added: Mapping[int, Mapping[str, Any]]) -> int:
    if not exists:
        return UNUSED
    if number in added:
        return CONTROL_TYPE if added[number].get("special") else USER_DEFINED
    return BYTE if _BYTE_TOKEN.fullmatch(text) else NORMAL


def _pre(tokenizer: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """The name that llama.cpp has for these regular expressions."""
    cuts = tuple(_patterns(tokenizer.get("pre_tokenizer")))
    for name, known in pre_tokenizers().items():
        if known.patterns == cuts and name:
            return name, ()
    return UNKNOWN_PRE, (
        f"llama.cpp has no name for this pre-tokenizer; `{UNKNOWN_PRE}` was written, and rare texts may be cut otherwise",
    )


# What `tokenizers` cuts by where ByteLevel itself does it.
BYTE_LEVEL_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _patterns(pre: Any) -> list[str]:
    match pre:
        case {"type": "Sequence"}:
            parts = cast(list[Any], pre["pretokenizers"])
            return [pattern for part in parts for pattern in _patterns(part)]
        case {"type": "Split", "pattern": {"Regex": str(pattern)}}:
            return [pattern]
        case {"type": "Digits", "individual_digits": True}:
            return [r"\p{N}"]
        case {"type": "ByteLevel", "use_regex": True}:
            return [BYTE_LEVEL_PATTERN]
        case _:
            return []
