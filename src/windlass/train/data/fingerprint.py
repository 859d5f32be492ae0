"""Which tokenizer made the tokens: shards of another are of no use to a model."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from windlass.errors import BadInput


def tokenizer_fingerprint(path: Path) -> str:
    """SHA-256 of a folder's tokenizer.json, or of the one that a model's file makes."""
    file = path / "tokenizer.json"
    if (path.is_dir() and not file.is_file()) or not path.exists():
        raise BadInput(f"{file} is missing; copy it from where the model came from")
    if path.is_dir():
        return sha256(file.read_bytes()).hexdigest()
    from windlass.weights.text_of import model_text

    return sha256(model_text(path).tokenizer.backend.to_str().encode()).hexdigest()
