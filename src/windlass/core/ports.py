"""Seams that would point upward: what a lower package offers to whoever wires it in."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol


class TensorStore(Protocol):
    """A checkpoint to read from, whatever its format, under the names of its Hugging Face form.

    Rows are read with plain reads, so that a store never holds more than it was asked for. A tensor of more than two dimensions
    is read as rows of its last dimension, all leading ones flattened.
    """

    config: dict[str, Any]
    """config.json, or what stands for it in the format."""

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str:
        """`BF16`, `F16`, `F32`, `F8_E4M3`, `I8`, `U8`...: as safetensors spells it."""
        ...

    def read(self, name: str, start: int, stop: int) -> Any:
        """Rows start..stop as a torch tensor [stop - start, last dimension] (one-dimensional tensors: elements start..stop)."""
        ...

    def close(self) -> None: ...
