"""A GGUF vocabulary -> tokenizer.json and its companions, for the `tokenizers` library.

Turns metadata into plain JSON values without any library. A `sentencepiece` vocabulary is treated as BPE, as in llama.cpp:
a GGUF file does not record that it was trained as unigram.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from windlass.errors import BadInput
from windlass.model.text.tokenize.gguf_vocabulary import ADDED, CONTROL, GgufVocabulary, read_vocabulary
from windlass.model.text.tokenize.pretokenizers import PreTokenizer

Json = dict[str, Any]

SPACE = "▁"
"""SentencePiece's space symbol."""
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer_files(metadata: Mapping[str, Any], where: str = "GGUF") -> dict[str, Json]:
    """File name -> content."""
    vocabulary = read_vocabulary(metadata, where)
    special = _special_tokens(metadata, vocabulary, where)
    return {
        "tokenizer.json": _tokenizer(vocabulary, special),
        "tokenizer_config.json": _tokenizer_config(metadata, vocabulary, special),
        "special_tokens_map.json": dict(special),
    }


def write_tokenizer(metadata: Mapping[str, Any], directory: Path, where: str = "GGUF") -> None:
    for name, content in tokenizer_files(metadata, where).items():
        (directory / name).write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2))


def _special_tokens(metadata: Mapping[str, Any], vocabulary: GgufVocabulary, where: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, key in _SPECIAL.items():
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if number is None:
            continue
        if not isinstance(number, int) or not 0 <= number < len(vocabulary.tokens):
            raise BadInput(
                f"{where}: tokenizer.ggml.{key}_token_id is {number!r:.40} in a vocabulary of {len(vocabulary.tokens)}"
            )
        found[name] = vocabulary.tokens[number]
    return found


def _tokenizer(vocabulary: GgufVocabulary, special: Mapping[str, str]) -> Json:
    by_bytes = vocabulary.pre is not None
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(vocabulary, number) for number in vocabulary.of_types(ADDED)],
        "normalizer": _byte_normalizer(vocabulary.pre) if vocabulary.pre else _space_normalizer(vocabulary),
        "pre_tokenizer": _pre_tokenizer(vocabulary.pre) if vocabulary.pre else None,
        "post_processor": _frame(vocabulary, special),
        "decoder": _BYTE_LEVEL if by_bytes else _space_decoder(vocabulary),
        "model": _model(vocabulary, None if by_bytes else special.get("unk_token")),
    }


def _added(vocabulary: GgufVocabulary, number: int) -> Json:
    """Matched as a whole before anything else; control tokens are also left out of decoded text."""
    return {
        "id": number,
        "content": vocabulary.tokens[number],
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": vocabulary.types[number] in CONTROL,
    }


def _model(vocabulary: GgufVocabulary, unknown: str | None) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": unknown is not None,
        "byte_fallback": vocabulary.pre is None,
        "ignore_merges": vocabulary.pre is not None and vocabulary.pre.ignore_merges,
        "vocab": vocabulary.numbers(),
        "merges": [list(pair) for pair in vocabulary.merges],
    }


# --- byte-level

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def _byte_normalizer(pre: PreTokenizer) -> Json | None:
    return {"type": pre.normalizer} if pre.normalizer else None


def _pre_tokenizer(pre: PreTokenizer) -> Json:
    cuts = [{"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False} for regex in pre.patterns]
    return {"type": "Sequence", "pretokenizers": [*cuts, _BYTE_LEVEL]}


# --- SentencePiece


def _space_normalizer(vocabulary: GgufVocabulary) -> Json:
    """Prepends a space to the text and after special tokens, then replaces spaces by the symbol."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepend = [{"type": "Prepend", "prepend": SPACE}] if vocabulary.add_space else []
    return {"type": "Sequence", "normalizers": [*prepend, replace]}


def _space_decoder(vocabulary: GgufVocabulary) -> Json:
    parts: list[Json] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if vocabulary.add_space:
        parts.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": parts}


# --- special tokens and config


def _frame(vocabulary: GgufVocabulary, special: Mapping[str, str]) -> Json:
    """Adds BOS and EOS when special tokens are requested."""
    before = [special["bos_token"]] if vocabulary.add_bos and "bos_token" in special else []
    after = [special["eos_token"]] if vocabulary.add_eos and "eos_token" in special else []
    numbers = vocabulary.numbers()

    def around(letter: str, type_id: int) -> list[Json]:
        tokens = [[{"SpecialToken": {"id": token, "type_id": type_id}} for token in side] for side in (before, after)]
        return [*tokens[0], {"Sequence": {"id": letter, "type_id": type_id}}, *tokens[1]]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {token: {"id": token, "ids": [numbers[token]], "tokens": [token]} for token in {*before, *after}},
    }


def _tokenizer_config(metadata: Mapping[str, Any], vocabulary: GgufVocabulary, special: Mapping[str, str]) -> Json:
    config: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": vocabulary.add_bos,
        "add_eos_token": vocabulary.add_eos,
        "clean_up_tokenization_spaces": False,
        **special,
    }
    length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    if isinstance(length, int):
        config["model_max_length"] = length
    config["added_tokens_decoder"] = {
        str(number): {key: value for key, value in _added(vocabulary, number).items() if key != "id"}
        for number in vocabulary.of_types(ADDED)
    }
    template = _chat_template(metadata)
    return config | ({"chat_template": template} if template else {})


def _chat_template(metadata: Mapping[str, Any]) -> str | list[Json] | None:
    """One template, or the default and named ones (`tool_use`, `rag`) as a list."""
    default = metadata.get("tokenizer.chat_template")
    prefix = "tokenizer.chat_template."
    named = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    if not any(isinstance(template, str) for template in named.values()):
        return default if isinstance(default, str) else None
    every = {"default": default} | named
    return [{"name": name, "template": template} for name, template in every.items() if isinstance(template, str)]
