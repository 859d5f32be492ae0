"""Where the files of a model lie: a path, a conversion of ours by its name, the bundled one, or what the hub has, downloaded if need be."""

from __future__ import annotations

import os
from pathlib import Path

from windlass.errors import BadInput


def locate(word: str, shown: bool) -> Path:
    """`shown`: a download shows its progress."""
    path = _path(word)
    if path is not None:
        from windlass.weights.files import model_file

        return model_file(path)
    from windlass.bundled.models import find_bundled
    from windlass.families.registry import find, unknown_model
    from windlass.formats.hub.hub import looks_like_hub_name, pull
    from windlass.formats.hub.local import models_directory

    if word.startswith((".", "~", os.sep)) or word.endswith((".gguf", ".m")):
        raise BadInput(f"{word} does not exist; give a model directory, a .gguf or .m file, or a name from `windlass models`")
    own = models_directory() / word
    if own.is_dir():
        return own
    inside = find_bundled(word)
    if inside is not None:
        return inside
    known = find(word)
    name = known.hub if known else word
    if not looks_like_hub_name(name):
        raise unknown_model(word)
    from windlass.cli.convert.run import pull_with_progress

    return pull_with_progress(name, 8, shown, pull)


def _path(word: str) -> Path | None:
    try:
        path = Path(word).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):  # too long for a name; a home of nobody
        return None
