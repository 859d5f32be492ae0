"""The bundled model: small and trained (by the recipe beside it), to try Windlass without a download."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def bundled_names() -> list[str]:
    return sorted(folder.name for folder in FOLDER.glob("*") if (folder / "config.json").is_file())


def find_bundled(name: str) -> Path | None:
    return FOLDER / name if name in bundled_names() else None
