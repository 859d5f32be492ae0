"""The model that comes inside the package: small and trained (by the recipe beside it), so that there is one to show without a download."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "bundled"


def bundled_names() -> list[str]:
    return sorted(folder.name for folder in FOLDER.glob("*") if (folder / "config.json").is_file())


def find_bundled(name: str) -> Path | None:
    return FOLDER / name if name in bundled_names() else None
