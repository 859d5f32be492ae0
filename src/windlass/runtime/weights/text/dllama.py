"""A `.t` file's vocabulary -> tokenizer.json for the `tokenizers` library. Plain values; needs neither that library nor torch.

The format has bytes and scores but no merges and no pre-tokenizer, so text is tokenized as Distributed Llama does it: special tokens
first, then repeatedly the adjacent pair whose merge has the highest score. Files that we wrote say in a comment of the chat template how
text is split first.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from windlass.model.formats.dllama.tokenizer import LEAST_MERGED, DllamaTokenizer

_MARKED = re.compile(rb"<\|.+\|>|</?s>|<(unk|pad|bos|eos)>|\[/?INST\]", re.DOTALL)
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
MOST_SPECIAL = 4
"""The format treats every id from BOS on as special. Ignored where that is more than a quarter of the vocabulary: BOS then comes first."""


def tokenizer_json(stored: DllamaTokenizer) -> dict[str, Any]:
    texts, special, splitting = _texts(stored), special_ids(stored), stored.splitting
    vocabulary = {text: number for number, text in enumerate(texts)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(number, texts[number]) for number in special],
        "normalizer": splitting.get("normalizer"),
        "pre_tokenizer": splitting.get("pre_tokenizer") or _BYTE_LEVEL,
        "post_processor": _frame(stored, texts),
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, _BYTE_LEVEL]},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": bool(splitting.get("ignore_merges")),
            "vocab": vocabulary,
            "merges": _merges(stored, texts, frozenset(special)),
        },
    }


def tokenizer_config(stored: DllamaTokenizer) -> dict[str, Any]:
    """Special tokens and chat template."""
    config: dict[str, Any] = {"chat_template": stored.own_template} if stored.own_template else {}
    for name, number in (("bos_token", stored.bos_id), ("eos_token", stored.eos_ids[0] if stored.eos_ids else None)):
        if number is not None:
            config[name] = stored.vocabulary[number].decode(errors="replace")
    return config


def special_ids(stored: DllamaTokenizer) -> list[int]:
    """Those that nothing merges into are; in files of other converters, the ids from BOS on, else what looks like one."""
    size, bos = len(stored.vocabulary), stored.bos_id
    unmerged = {number for number, score in enumerate(stored.scores) if score <= LEAST_MERGED}
    if bos is not None and (size - bos) * MOST_SPECIAL <= size:
        return sorted(unmerged | set(range(bos, size)))
    named = {*stored.eos_ids, *(() if bos is None else (bos,))} | unmerged
    return (
        sorted(named)
        if unmerged
        else sorted(named | {number for number, token in enumerate(stored.vocabulary) if _MARKED.fullmatch(token)})
    )


def _texts(stored: DllamaTokenizer) -> list[str]:
    """Unique text for each token. Of duplicates (a byte token and the same character) the later one is used for encoding."""
    special = set(special_ids(stored))
    texts: list[str] = []
    for number, token in enumerate(stored.vocabulary):
        plain = token.decode(errors="replace") if number in special else "".join(byte_characters()[byte] for byte in token)
        texts.append(plain)
    last = {text: number for number, text in enumerate(texts)}
    return [
        text if last[text] == number else _duplicate_name(number, stored.vocabulary[number]) for number, text in enumerate(texts)
    ]


def _duplicate_name(number: int, token: bytes) -> str:
    return f"<0x{token[0]:02X}>" if len(token) == 1 else f"<|same_{number}|>"


def _merges(stored: DllamaTokenizer, texts: list[str], special: frozenset[int]) -> list[list[str]]:
    numbers = {text: number for number, text in enumerate(texts) if number not in special}
    ranked: list[tuple[float, int, int, str, str]] = []
    for text, number in numbers.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in numbers and right in numbers:
                ranked.append((-stored.scores[number], numbers[left], numbers[right], left, right))
    ranked.sort()
    return [[left, right] for *_, left, right in ranked]


def _added(number: int, text: str) -> dict[str, Any]:
    return {
        "id": number,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }


def _frame(stored: DllamaTokenizer, texts: list[str]) -> dict[str, Any]:
    """Post-processor that adds BOS, where the file says so."""
    bos = [texts[stored.bos_id]] if stored.add_bos and stored.bos_id is not None else []

    def around(letter: str, type_id: int) -> list[dict[str, Any]]:
        return [
            *({"SpecialToken": {"id": token, "type_id": type_id}} for token in bos),
            {"Sequence": {"id": letter, "type_id": type_id}},
        ]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {token: {"id": token, "ids": [stored.bos_id], "tokens": [token]} for token in bos},
    }


@cache
def byte_characters() -> tuple[str, ...]:
    """GPT-2's byte-to-character table (github.com/openai/gpt-2, src/encoder.py): printable bytes as they are, others from U+0100 on."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return tuple(chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256))
