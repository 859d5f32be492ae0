"""Rows of a quantized matrix as a checkpoint stores them: codes, scales, offsets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class CodedRows:
    """PackedRows for `Panels.put`, or (without scales) for `Panels.put_blocks`."""

    codes: Tensor
    scale: Tensor | None = None
    offset: Tensor | None = None

    def pinned(self) -> CodedRows:
        """In pinned memory, from which a GPU copies asynchronously."""
        return self._map(Tensor.pin_memory)

    def select(self, index: Tensor) -> CodedRows:
        return self._map(lambda tensor: tensor[index])

    def columns(self, left: int, right: int, num_in: int) -> CodedRows:
        """Inputs left..right of `num_in`. Both are group boundaries, so every tensor is sliced in proportion."""
        if right - left == num_in:
            return self

        def cut(tensor: Tensor) -> Tensor:
            width = tensor.shape[-1]
            return tensor if width == 1 else tensor[..., width * left // num_in : width * right // num_in]

        return self._map(cut)

    def _map(self, change: Callable[[Tensor], Tensor]) -> CodedRows:
        scale, offset = (None if tensor is None else change(tensor) for tensor in (self.scale, self.offset))
        return CodedRows(change(self.codes), scale, offset)
