"""Token shards carry their tokenizer and its fingerprint, so that a model trained on them can be exported with it."""

from __future__ import annotations

import shutil
from hashlib import sha256
from pathlib import Path

import msgspec

from windlass.model.formats.disk.atomic import write_atomically, write_errors
from windlass.model.text.tokenize.tokenizer import Tokenizer

FOLDER = "tokenizer"
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "special_tokens_map.json",
    "LICENSE",
    "NOTICE",
)


def tokenizer_fingerprint(path: Path, found: Tokenizer) -> str:
    """SHA-256 of a folder's tokenizer.json, or of the tokenizer inside a model file. `found`: the loaded tokenizer."""
    return sha256((path / FILES[0]).read_bytes() if path.is_dir() else found.backend.to_str().encode()).hexdigest()


def copy_tokenizer(path: Path, found: Tokenizer, shards: Path, template: str | None = None) -> None:
    """Copies the tokenizer to the shards' folder; `template` replaces its chat template."""
    into = shards / FOLDER
    with write_errors(into, 0):
        into.mkdir(exist_ok=True)
        for name in FILES if path.is_dir() else ():
            if (path / name).is_file():
                shutil.copyfile(path / name, into / name)
    if not path.is_dir():
        write_atomically(into / "tokenizer.json", found.backend.to_str().encode())
        write_atomically(into / "tokenizer_config.json", msgspec.json.encode(found.config))
    if template is not None:
        write_atomically(into / "chat_template.jinja", template.encode())
