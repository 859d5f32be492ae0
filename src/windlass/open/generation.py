"""A model's own sampling defaults (generation_config.json)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from windlass.core.request import Sampling
from windlass.errors import BadInput

DEFAULTS: dict[str, Any] = {"temperature": 0.7, "top_p": 0.95}
"""Used by `windlass run`, `windlass serve`, its page and `windlass.Client` where neither the user nor the model's generation config says."""
FROM_CONFIG = {"temperature": float, "top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float}


def generation_defaults(model: Path) -> dict[str, Any]:
    """What the model's generation config sets, as arguments of Sampling."""
    return from_config(read_generation_config(model))


def default_sampling(model: Path) -> dict[str, Any]:
    """What applies where the user says nothing: the model's own numbers, else ours."""
    return DEFAULTS | generation_defaults(model)


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Its usable numbers. `do_sample: false` means greedy; `top_k: 0` means no top-k."""
    found: dict[str, Any] = {"temperature": 0.0} if config.get("do_sample") is False else {}
    for key, kind in FROM_CONFIG.items() if not found else ():
        value = config.get(key)
        if isinstance(value, kind | int) and not isinstance(value, bool) and (key != "top_k" or value > 0):
            found[key] = value
    try:
        Sampling(**found)
    except BadInput:  # an invalid file must not prevent running
        return {}
    return found


def read_generation_config(model: Path) -> dict[str, Any]:
    """From the model's directory, or beside its file: one of its own (NAME.generation_config.json) or the folder's. Empty: none is readable."""
    from windlass.runtime.weights.files import GENERATION_CONFIG, own_generation_config

    beside = [model / GENERATION_CONFIG] if model.is_dir() else [own_generation_config(model), model.parent / GENERATION_CONFIG]
    for path in beside:
        with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
            return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    return {}
