"""Loads checkpoints of every format: this rank's shard of each tensor, in the layout its kernels need.

Submodules are imported on first use, so a process that only needs the tokenizer (`weights.model_text`) does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windlass.runtime.weights.load.checkpoint import CheckpointWeights
    from windlass.runtime.weights.load.dictionary import DictWeights
    from windlass.runtime.weights.load.prefetch import trim_heap
    from windlass.runtime.weights.load.random import RandomWeights
    from windlass.runtime.weights.source import OpenedModel, open_model, open_source
    from windlass.runtime.weights.text.files import ModelText, SamplingDefaults, model_text

_MODULES = {
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
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"windlass.runtime.weights.{_MODULES[name]}"), name)
