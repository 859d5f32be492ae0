"""The tokenizer goes with its tokens: shards say which one made them, and carry it, so that what learns from them can be given out whole."""

from __future__ import annotations

import shutil
from hashlib import sha256
from pathlib import Path

import msgspec

from windlass.errors import BadInput
from windlass.formats.disk import explained, write_atomically

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


def tokenizer_fingerprint(path: Path) -> str:
    """SHA-256 of a folder's tokenizer.json, or of the one that a model's file makes."""
    if path.is_file():
        return sha256(_of_file(path)[0]).hexdigest()
    file = path / "tokenizer.json"
    if not file.is_file():
        raise BadInput(f"{file} is missing; copy it from where the model came from")
    return sha256(file.read_bytes()).hexdigest()


def copy_tokenizer(path: Path, shards: Path, template: str | None = None) -> None:
    """To the folder of the shards; `template` was used instead of its own."""
    into = shards / FOLDER
    with explained(into, 0):
        into.mkdir(exist_ok=True)
        for name in FILES if path.is_dir() else ():
            if (path / name).is_file():
                shutil.copyfile(path / name, into / name)
    if path.is_file():
        made, config = _of_file(path)
        write_atomically(into / "tokenizer.json", made)
        write_atomically(into / "tokenizer_config.json", config)
    if template is not None:
        write_atomically(into / "chat_template.jinja", template.encode())


def _of_file(path: Path) -> tuple[bytes, bytes]:
    """tokenizer.json and its config, of a model that is one file."""
    from windlass.weights.text_of import model_text

    found = model_text(path).tokenizer
    return found.backend.to_str().encode(), msgspec.json.encode(found.config)
