"""A Hugging Face tokenizer (tokenizer.json and related files) as Distributed Llama's list of bytes and scores.

Only BPE tokenizers can be converted. Distributed Llama has neither merges nor a pre-tokenizer: it merges by score (here minus the
id, as its own converter does; special tokens have one that is too low to merge into), so token ids can differ from the original's;
`notes` says where they must.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import msgspec

from windlass.errors import BadInput
from windlass.model.formats.dllama.tokenizer import CHAT_MARKS, NEVER_MERGED, DllamaTokenizer, with_splitting
from windlass.runtime.weights.text.dllama import byte_characters

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"
MAX_TOKENS = 2**22


def read_hugging_face(folder: Path) -> tuple[DllamaTokenizer, tuple[str, ...]]:
    """The tokenizer of a model directory, and warnings about how Distributed Llama will use it."""
    tokenizer = _json(folder / "tokenizer.json")
    if tokenizer is None:
        raise BadInput(f"{folder} has no tokenizer.json, from which the .t file is made")
    settings = _json(folder / "tokenizer_config.json") or {}
    added, model = _added(folder, tokenizer), _model_tokens(folder, tokenizer)
    tokens = model | {index: token.content for index, token in added.items()}
    if min(tokens) < 0 or max(tokens) >= MAX_TOKENS:
        raise BadInput(f"{folder / 'tokenizer.json'} has token ids outside 0 to {MAX_TOKENS - 1}")
    special = sorted(index for index, token in added.items() if token.special)
    bos = _bos(folder, settings, tokens)
    is_byte_level = _is_byte_level(tokenizer)
    to_bytes = _raw_bytes if is_byte_level else _sentence_piece_bytes
    template = _template(folder, settings)
    found = DllamaTokenizer(
        vocabulary=_vocabulary(tokens, {index: to_bytes(text) for index, text in model.items() if index not in added}),
        scores=[NEVER_MERGED if index in added else -float(index) for index in range(max(tokens) + 1)],
        # Distributed Llama treats every id from BOS on as special; without a BOS the first special token takes its place.
        bos_id=bos if bos is not None else next(iter(special), None),
        eos_ids=_stops(folder, settings, tokens),
        chat_template=with_splitting(template, _splitting(tokenizer)) if is_byte_level else template,
        add_bos=bos is not None and bool(settings.get("add_bos_token", True)),
    )
    return found, tuple(_notes(found, special, max(model.keys() - added.keys(), default=0)))


def _json(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        values = msgspec.json.decode(file.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(f"{file} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise BadInput(f"{file}: expected a JSON object")
    return cast(dict[str, Any], values)


class _Added(msgspec.Struct):
    """An added token; its content is literal text."""

    id: int
    content: str
    special: bool = False


def _added(folder: Path, tokenizer: dict[str, Any]) -> dict[int, _Added]:
    try:
        found = msgspec.convert(tokenizer.get("added_tokens") or [], list[_Added])
    except msgspec.ValidationError as error:
        raise BadInput(f"{folder / 'tokenizer.json'}: added_tokens: {error}") from None
    return {token.id: token for token in found}


def _model_tokens(folder: Path, tokenizer: dict[str, Any]) -> dict[int, str]:
    model = _object(tokenizer.get("model"))
    vocabulary = _object(model.get("vocab")) if model.get("type") == "BPE" else {}
    if not vocabulary:
        raise BadInput(f"{folder / 'tokenizer.json'} is not a BPE tokenizer; Distributed Llama supports no other kind")
    if not all(isinstance(index, int) for index in vocabulary.values()):
        raise BadInput(f"{folder / 'tokenizer.json'}: a token id is not an integer")
    return {index: text for text, index in vocabulary.items()}


def _splitting(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """What comes before merging, which the format has no field for."""
    return {
        "normalizer": tokenizer.get("normalizer"),
        "pre_tokenizer": tokenizer.get("pre_tokenizer"),
        "ignore_merges": bool(_object(tokenizer.get("model")).get("ignore_merges")),
    }


def _object(value: object) -> dict[str, Any]:
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def _vocabulary(tokens: dict[int, str], ordinary: dict[int, bytes]) -> list[bytes]:
    """Unused ids and empty tokens get a placeholder: the format cannot store an empty token."""
    return [
        ordinary.get(index) or tokens.get(index, "").encode() or f"<|unused_{index}|>".encode()
        for index in range(max(tokens) + 1)
    ]


def _is_byte_level(tokenizer: dict[str, Any]) -> bool:
    """Byte-level BPE (GPT-2), where characters stand for bytes; otherwise SentencePiece style."""
    return (
        not tokenizer["model"].get("byte_fallback")
        and '"ByteLevel"' in msgspec.json.encode([tokenizer.get("pre_tokenizer"), tokenizer.get("decoder")]).decode()
    )


@cache
def _byte_of_character() -> dict[str, int]:
    return {character: byte for byte, character in enumerate(byte_characters())}


def _raw_bytes(token: str) -> bytes:
    table = _byte_of_character()
    return b"".join(bytes([table[mark]]) if mark in table else mark.encode() for mark in token)


def _sentence_piece_bytes(token: str) -> bytes:
    if found := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(found[1], 16)])
    return token.replace(_SPACE, " ").encode()


def _content(value: object) -> str | None:
    """tokenizer_config.json writes a special token as a string or as an object with `content`."""
    text: object = value if isinstance(value, str) else _object(value).get("content")
    return text if isinstance(text, str) else None


def _id_of(value: object, tokens: dict[int, str]) -> int | None:
    text = _content(value)
    return next((index for index, token in tokens.items() if token == text), None)


def _bos(folder: Path, settings: dict[str, Any], tokens: dict[int, str]) -> int | None:
    found = _id_of(settings.get("bos_token"), tokens)
    if found is not None:
        return found
    value = (_json(folder / "config.json") or {}).get("bos_token_id")
    return value if isinstance(value, int) and value in tokens else None


def _stops(folder: Path, settings: dict[str, Any], tokens: dict[int, str]) -> tuple[int, ...]:
    """Stop tokens of the first file that lists any, and the tokenizer's EOS."""
    found: list[object] = []
    for name in ("generation_config.json", "config.json"):
        value = (_json(folder / name) or {}).get("eos_token_id")
        if value is not None:
            found += value if isinstance(value, list) else [value]
            break
    found.append(_id_of(settings.get("eos_token"), tokens))
    return tuple(dict.fromkeys(index for index in found if isinstance(index, int) and index in tokens))


def _template(folder: Path, settings: dict[str, Any]) -> str:
    """A string, a chat_template.jinja file, or a list of named templates of which `default` is used."""
    value = settings.get("chat_template")
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in map(_object, cast(list[object], value)) if item}
        value = named.get("default") or next(iter(named.values()), None)
    beside = folder / "chat_template.jinja"
    if value is None and beside.is_file():
        return beside.read_text(encoding="utf-8")
    return value if isinstance(value, str) else ""


def _notes(tokenizer: DllamaTokenizer, special: list[int], last_ordinary: int) -> Iterator[str]:
    first = tokenizer.bos_id
    if first is None or last_ordinary > first or min(special, default=first) < first:
        yield (
            "Distributed Llama treats ids from BOS on as special and all before it as text; this vocabulary is ordered "
            "differently, so it will tokenize text wrongly (Windlass reads the file right)"
        )
    if tokenizer.own_template and not any(mark in tokenizer.own_template for mark in CHAT_MARKS):
        yield "Distributed Llama does not support this chat template: text completion works, chat does not"
