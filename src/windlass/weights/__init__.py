"""From checkpoints of every format to a decoder's tensors: this rank's slices, in the layout its kernels want.

Imports on use: a process that only needs a tokenizer (`weights.text_of`) does without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windlass.weights.load.checkpoint import CheckpointWeights
    from windlass.weights.load.dictionary import DictWeights
    from windlass.weights.load.random import RandomWeights
    from windlass.weights.load.stream import give_back_memory
    from windlass.weights.source import Opened, open_model, open_source
    from windlass.weights.text.files import ModelText, SamplingDefaults, model_text, tokenizer_for

_PLACES = {
    "CheckpointWeights": "checkpoint",
    "DictWeights": "dictionary",
    "ModelText": "text_of",
    "Opened": "source",
    "RandomWeights": "random",
    "SamplingDefaults": "text_of",
    "give_back_memory": "stream",
    "open_model": "source",
    "open_source": "source",
    "model_text": "text_of",
    "tokenizer_for": "text_of",
}

__all__ = [
    "CheckpointWeights",
    "DictWeights",
    "ModelText",
    "Opened",
    "RandomWeights",
    "SamplingDefaults",
    "give_back_memory",
    "model_text",
    "open_model",
    "open_source",
    "tokenizer_for",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"windlass.weights.{_PLACES[name]}"), name)
