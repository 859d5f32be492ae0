"""Copies a run's state to host memory: the only part of a save that training waits for.

Pinned buffers for GPU tensors are reused. Knows nothing of files.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from windlass.tasks.train.params.shards import TensorShard


class HostCopy:
    def __init__(self) -> None:
        self._pinned: dict[tuple[Any, ...], Tensor] = {}

    def take(self, state: dict[str, Any]) -> dict[str, Any]:
        """A copy that training does not change. Valid until the next `take`."""
        with torch.no_grad():
            copied = self._copied(state, ())
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return copied

    def _copied(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, DTensor):
            if value.ndim == 0:  # replicated, and DCP cannot shard it
                return self._tensor(value.to_local(), path)
            return DTensor(self._tensor(value.to_local(), path), value._spec, requires_grad=False)  # pyright: ignore
        if isinstance(value, TensorShard):  # before Tensor: it is a subclass
            return TensorShard(value.part, self._tensor(value.tensor, path), value.owned)
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, dict):
            return {key: self._copied(inner, (*path, key)) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copied(inner, (*path, place)) for place, inner in enumerate(value))
        return copy.deepcopy(value)

    def _tensor(self, tensor: Tensor, path: tuple[Any, ...]) -> Tensor:
        tensor = tensor.detach()
        if not tensor.is_cuda:
            return tensor.clone(memory_format=torch.contiguous_format)
        held = self._pinned.get(path)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.numel() > 0)
            self._pinned[path] = held
        return held.copy_(tensor, non_blocking=True)
