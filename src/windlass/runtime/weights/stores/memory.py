"""A state_dict in memory as a TensorStore."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from windlass.errors import BadCheckpoint
from windlass.model.formats.disk.reader import check_rows, row_shape
from windlass.model.formats.dtypes import dtype_name


class MemoryStore:
    def __init__(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None = None) -> None:
        self.config: dict[str, Any] = dict(config or {})
        self._tensors = tensors

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensor(name).shape)

    def dtype(self, name: str) -> str:
        return dtype_name(self._tensor(name).dtype)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        tensor = self._tensor(name).detach()
        shape = row_shape(tuple(tensor.shape))
        check_rows(name, start, stop, shape[0])
        return tensor.reshape(shape)[start:stop]

    def close(self) -> None:
        """Nothing is open."""

    def _tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise BadCheckpoint("not in the state_dict", tensor=name)
        return self._tensors[name]
