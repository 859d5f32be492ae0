"""Protocols between packages that may not import each other; `cli` wires the implementations in."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

from windlass.core.metrics.watched import Watched
from windlass.core.rule import Rule
from windlass.core.scheme import Stored


class TensorStore(Protocol):
    """A checkpoint of any format, under Hugging Face tensor names.

    Reads are explicit (never mapped), so a store holds no more than was requested. A tensor of more than two dimensions is read as
    rows of its last dimension, leading dimensions flattened.
    """

    config: dict[str, Any]
    """config.json, or its equivalent in the format."""

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


class PieceStore(TensorStore, Protocol):
    """A store that also reads many tensors in a few large reads (safetensors)."""

    def read_pieces(self, pieces: Sequence[tuple[str, int, memoryview]]) -> None:
        """Of each (tensor, offset in its bytes, buffer), stored bytes into the buffer."""
        ...


class FileStore(TensorStore, Protocol):
    """A store that says where the bytes of a tensor lie (safetensors)."""

    def place_of(self, name: str) -> tuple[Path, int]:
        """The file to open, and the offset of the first byte."""
        ...


class BlockStore(TensorStore, Protocol):
    """A store of a format with quantized blocks (GGUF, Distributed Llama): rows can also be read still quantized."""

    def block_type(self, name: str) -> str:
        """`Q4_0`, `Q8_0`, `F16`...: ggml's name of how the file stores it."""
        ...

    def raw_blocks(self, name: str, start: int, stop: int) -> tuple[str, bytearray]:
        """Block type, and rows start..stop as stored."""
        ...


class QuantizingStore(TensorStore, Protocol):
    """A store of plain floats that are quantized while they load."""

    def packed_as(self, rule: Rule) -> Stored | None:
        """How a matrix is quantized; None: it stays a float."""
        ...

    def kept_dtype(self, rule: Rule) -> str:
        """Of a tensor that stays a float."""
        ...

    def coded(self, shard: Any, start: int, stop: int) -> tuple[Any, Any]:
        """Codes and scales of this rank's columns of rows start..stop of ours."""
        ...

    def dequantized(self, shard: Any, start: int, stop: int) -> Any:
        """The same as fp32 numbers."""
        ...


class Weights(Protocol):
    """Where a decoder takes its tensors from while it is built: a checkpoint, random numbers, a trainer's parameters.

    Names are ours (`layers.3.mixer.q.weight`). Returns this rank's shard, on its device, in the layout its kernels need: a dense
    tensor or quantized panels. Several names are concatenated along the output, as fused projections need.
    """

    device: Any
    dtype: Any
    """Of activations."""

    def matrix(self, *names: str) -> Any:
        """[out, in]."""
        ...

    def dense_matrix(self, *names: str) -> Any:
        """[out, in] as a dense tensor, dequantized if necessary."""
        ...

    def vector(self, *names: str) -> Any:
        """float32 [n], or None where the model has none (an absent bias)."""
        ...

    def experts(self, layer: int, *parts: str) -> Any:
        """[experts, out, in] of `gate`, `up`, `down` of one layer, concatenated along the output."""
        ...

    def expert_vectors(self, layer: int, *parts: str) -> Any:
        """Biases [experts, out], or None."""
        ...


class Watching(Protocol):
    """Keeps a day of numbers and evaluates alert rules, in the server's process (`tasks/observe/watch.py`)."""

    def tick(self) -> object:
        """Every few seconds, in a thread."""
        ...

    def watched(self) -> Watched: ...

    def close(self) -> None: ...
