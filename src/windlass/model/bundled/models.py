"""The bundled model: small and trained (by the recipe beside it), to try Windlass without a download."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def bundled_names() -> list[str]:
    return sorted(folder.name for folder in FOLDER.glob("*") if (folder / "config.json").is_file())


def find_bundled(name: str) -> Path | None:
    """Names are case-insensitive, as those of the registry."""
    return FOLDER / name.lower() if name.lower() in bundled_names() else None
