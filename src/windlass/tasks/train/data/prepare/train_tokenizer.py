"""Trains a small byte-level BPE tokenizer with single digits and the special tokens of a chat template.

Single digits help small models learn arithmetic: 347 is always three tokens (arXiv 2305.14201, 3.2). The byte fallback covers any text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from windlass.errors import BadInput, MissingExtra
from windlass.model.formats.disk.atomic import write_atomically

PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Words with a leading space, single digits, punctuation, line ends, spaces: the usual split of tokenizers since 2023."""
LARGEST = 1 << 20
NUM_BYTES = 256


def train_vocabulary(texts: Iterable[str], size: int, special: Sequence[str], end: str) -> str:
    """Returns tokenizer.json. `special` tokens get the first ids; `end` is one of them."""
    try:
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise MissingExtra("tokenizers", "train", "training a tokenizer") from None
    if not NUM_BYTES + len(special) <= size <= LARGEST:
        raise BadInput(
            f"a vocabulary of {size} is not possible: it needs at least {NUM_BYTES} bytes plus {len(special)} special tokens"
        )
    if end not in special:
        raise BadInput(f"the end token {end!r} is not among the special tokens")
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
    """Writes the tokenizer files of a model directory: tokenizer, chat template, generation config."""
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
