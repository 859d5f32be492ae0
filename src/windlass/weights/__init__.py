"""From checkpoints of every format to a decoder's tensors: this rank's slices, in the layout its kernels want.

Imports on use: a process that only needs a tokenizer (`weights.model_text`) does without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windlass.weights.load.checkpoint import CheckpointWeights
    from windlass.weights.load.dictionary import DictWeights
    from windlass.weights.load.prefetch import trim_heap
    from windlass.weights.load.random import RandomWeights
    from windlass.weights.source import OpenedModel, open_model, open_source
    from windlass.weights.text.files import ModelText, SamplingDefaults, model_text

_PLACES = {
    "CheckpointWeights": "load.checkpoint",
    "DictWeights": "load.dictionary",
    "ModelText": "text.files",
    "OpenedModel": "source",
    "RandomWeights": "load.random",
    "SamplingDefaults": "text.files",
    "trim_heap": "load.prefetch",
    "open_model": "source",
    "open_source": "source",
    "model_text": "text.files",
}

__all__ = [
    "CheckpointWeights",
    "DictWeights",
    "ModelText",
    "OpenedModel",
    "RandomWeights",
    "SamplingDefaults",
    "model_text",
    "open_model",
    "open_source",
    "trim_heap",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"windlass.weights.{_PLACES[name]}"), name)
