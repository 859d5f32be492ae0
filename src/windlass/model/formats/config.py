"""config.json of a checkpoint directory, as plain JSON values. What they mean is `families`' business."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import msgspec

from windlass.errors import BadInput


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a directory, or the file itself."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise BadInput(f"{path} has no config.json; give a model directory, a config.json, or a name from `windlass models`")
    try:
        values = msgspec.json.decode(file.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(f"{file} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise BadInput(f"{file}: expected a JSON object")
    return cast(dict[str, Any], values)
