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


class ByteStore(TensorStore, Protocol):
    """A store that can also read stored bytes straight into a buffer (safetensors)."""

    def read_into(self, name: str, byte_offset: int, buffer: memoryview) -> None: ...


class BlockStore(TensorStore, Protocol):
    """A store of a format with quantized blocks (GGUF, Distributed Llama): rows can also be read still quantized."""

    def block_type(self, name: str) -> str:
        """`Q4_0`, `Q8_0`, `F16`...: ggml's name of how the file stores it."""
        ...

    def raw_blocks(self, name: str, start: int, stop: int) -> tuple[str, bytearray]:
        """Block type, and rows start..stop as stored."""
        ...


class Weights(Protocol):
    """Where a decoder takes its tensors from while it is built: a checkpoint, random numbers, a trainer's parameters.

    Names are ours (`layers.3.mixer.q.weight`). What comes back is this rank's slice, on its device, in the layout its kernels
    want: a plain tensor, or packed panels. Several names are stacked along the output, which is how fused projections are made.
    """

    device: Any
    dtype: Any
    """Of activations."""

    def matrix(self, *names: str) -> Any:
        """[out, in]."""
        ...

    def dense_matrix(self, *names: str) -> Any:
        """[out, in] as a plain tensor, however it is stored: for matrices that are not only multiplied with."""
        ...

    def vector(self, *names: str) -> Any:
        """A float32 tensor [n], or None where the model has none of them (an absent bias)."""
        ...

    def experts(self, layer: int, *parts: str) -> Any:
        """[experts, out, in] of `gate`, `up`, `down` of one layer, parts stacked along the output."""
        ...

    def expert_vectors(self, layer: int, *parts: str) -> Any:
        """Biases [experts, out], or None."""
        ...
