"""Reads the model tensors of a checkpoint in one process, for export; not the optimizer.

Checkpoints hold our tensors under our names; a layer's experts are one tensor, `layers.3.ffn.experts.gate.weight` [experts, out, in].
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from windlass.errors import BadCheckpoint
from windlass.tasks.train.checkpoint.storage import SafePlanner, SafeReader

MODEL = "model."
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")


class CheckpointTensors:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        found = SafeReader(folder).read_metadata().state_dict_metadata
        self._stored = {
            name.removeprefix(MODEL): stored
            for name, stored in found.items()
            if name.startswith(MODEL) and isinstance(stored, TensorStorageMetadata)
        }
        self._last: tuple[str, Tensor] = ("", torch.empty(0))

    def names(self) -> list[str]:
        return list(self._stored)

    def num_elements(self, name: str) -> int:
        return self._stored[name].size.numel()

    def has(self, name: str) -> bool:
        return _stack_of(name)[0] in self._stored

    def tensor(self, name: str) -> Tensor:
        stack, expert = _stack_of(name)
        whole = self._read(stack)
        if expert is None:
            return whole
        if expert >= whole.shape[0]:
            raise BadCheckpoint(f"has {whole.shape[0]} experts, no expert {expert}", self._folder, stack)
        return whole[expert]

    def _read(self, name: str) -> Tensor:
        """Caches the last one: a layer's experts are read one by one."""
        if self._last[0] != name:
            if name not in self._stored:
                raise BadCheckpoint("the checkpoint has no such tensor", self._folder, name)
            stored = self._stored[name]
            into = torch.empty(stored.size, dtype=stored.properties.dtype)
            with warnings.catch_warnings():  # DCP warns about a single process without a group
                warnings.simplefilter("ignore")
                dcp.load({MODEL + name: into}, storage_reader=SafeReader(self._folder), planner=SafePlanner(), no_dist=True)
            self._last = (name, into)
        return self._last[1]


def _stack_of(name: str) -> tuple[str, int | None]:
    found = _EXPERT.fullmatch(name)
    return (f"{found[1]}.{found[3]}", int(found[2])) if found else (name, None)
