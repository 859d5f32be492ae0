"""Trains a small tokenizer: byte-level BPE in which every digit is a token of its own, with the special tokens a chat needs.

Digits apart is what lets small models learn arithmetic: 347 is always three tokens and never one or two (arXiv 2305.14201, 3.2).
Bytes stand below everything, so that any text can be written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from windlass.errors import BadInput, MissingExtra
from windlass.formats.disk.atomic import write_atomically

PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Words with the space before them, single digits, marks, line ends, spaces: as most tokenizers of 2023 and later cut text."""
LARGEST = 1 << 20
NUM_BYTES = 256


def train_vocabulary(texts: Iterable[str], size: int, special: Sequence[str], end: str) -> str:
    """tokenizer.json. `special` tokens get the first numbers; `end` is one of them."""
    try:
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise MissingExtra("tokenizers", "train", "training a tokenizer") from None
    if not NUM_BYTES + len(special) <= size <= LARGEST:
        raise BadInput(f"a vocabulary of {size} cannot be: {NUM_BYTES} bytes and {len(special)} special tokens are the least")
    if end not in special:
        raise BadInput(f"{end!r} is to end texts and is not among the special tokens")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=2,
    )
    backend.train_from_iterator(texts, trainer)
    return backend.to_str()


def write_tokenizer(folder: Path, tokenizer: str, template: str, end: str, stops: Sequence[str], context: int) -> None:
    """The files that a model directory has: tokenizer, chat template, and what ends an answer."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = _ids(tokenizer)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "eos_token": end,
        "pad_token": end,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    generation = {"do_sample": False, "eos_token_id": [ids[stop] for stop in stops], "pad_token_id": ids[end]}
    write_atomically(folder / "tokenizer.json", tokenizer.encode())
    write_atomically(folder / "tokenizer_config.json", msgspec.json.format(msgspec.json.encode(config), indent=2))
    write_atomically(folder / "chat_template.jinja", template.encode())
    write_atomically(folder / "generation_config.json", msgspec.json.format(msgspec.json.encode(generation), indent=2))


def _ids(tokenizer: str) -> dict[str, int]:
    return {token["content"]: token["id"] for token in msgspec.json.decode(tokenizer)["added_tokens"]}
