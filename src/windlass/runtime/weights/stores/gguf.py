"""A GGUF file (or a split one) as a TensorStore under Hugging Face names."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from windlass.errors import BadCheckpoint
from windlass.model.families.gguf.config import gguf_config
from windlass.model.families.gguf.names import GgufSource, architecture_of, gguf_sources
from windlass.model.formats.gguf.blocks import check_type
from windlass.model.formats.gguf.file import GgufFile, shard_paths

ROPE_FACTORS = "rope_freqs.weight"


class GgufStore:
    """Tensors are read as float32; `raw_blocks` returns the same rows still quantized.

    `metadata` has the vocabulary and the chat template, for text.tokenize.gguf_tokenizer.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = _opened(path)
        self.metadata: dict[str, Any] = self._files[0].metadata
        try:
            self._file_of = _merged(self._files)
            shapes = {name: file.tensors[name].shape for name, file in self._file_of.items()}
            self.config = gguf_config(self.metadata, shapes, self._rope_factors(), str(path))
            _, architecture = architecture_of(self.metadata, str(path))
            self._sources = _by_name(gguf_sources(architecture, shapes, self.config["head_dim"], str(path)), path)
            for source in self._sources.values():
                check_type(source.stored, self.block_type(source.name))
        except BaseException:
            self.close()
            raise

    def _rope_factors(self) -> list[float]:
        file = self._file_of.get(ROPE_FACTORS)
        if file is None:
            return []
        values = file.read(ROPE_FACTORS, 0, file.tensors[ROPE_FACTORS].shape[-1])
        return [float(value) for value in values]

    def names(self) -> Collection[str]:
        return self._sources.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._sources[name].shape

    def dtype(self, name: str) -> str:
        """Of what `read` returns; `block_type` says how it is stored."""
        return "F32"

    def block_type(self, name: str) -> str:
        """`Q4_0`, `Q8_0`, `F16`...: how the file stores it."""
        source = self._sources[name]
        return self._file_of[source.stored].tensors[source.stored].type.name

    def read(self, name: str, start: int, stop: int) -> Tensor:
        source = self._sources[name]
        file = self._file_of[source.stored]
        if len(source.shape) == 1:
            values = file.read(source.stored, 0, source.shape[0])
            return values[_stored_rows(source, start, stop)] if source.order else values[start:stop]
        return file.decode(source.stored, self._rows(source, start, stop))

    def raw_blocks(self, name: str, start: int, stop: int) -> tuple[str, bytearray]:
        """Rows start..stop in Hugging Face order, still quantized (only whole rows are permuted)."""
        source = self._sources[name]
        if len(source.shape) == 1:
            raise IndexError(f"{name} has one dimension; its blocks are not rows")
        return self.block_type(name), self._rows(source, start, stop)

    def _rows(self, source: GgufSource, start: int, stop: int) -> bytearray:
        num_rows = prod(source.shape[:-1])
        if not 0 <= start <= stop <= num_rows:
            raise IndexError(f"rows {start} to {stop} of {source.name}, which has {num_rows}")
        file = self._file_of[source.stored]
        if source.order is None or start == stop:
            return file.read_blocks(source.stored, source.first_row + start, source.first_row + stop)
        # Rows are permuted within a head only, so whole heads are read.
        dim = source.order.head_dim
        first, last = start // dim * dim, -(-stop // dim) * dim
        blocks = file.read_blocks(source.stored, first, last)
        stored = torch.frombuffer(blocks, dtype=torch.uint8).view(last - first, -1)
        chosen = stored[_stored_rows(source, start, stop) - first]
        return bytearray(chosen.numpy().data)

    def close(self) -> None:
        for file in self._files:
            file.close()


def _stored_rows(source: GgufSource, start: int, stop: int) -> Tensor:
    assert source.order is not None
    return torch.tensor([source.order.stored(row) for row in range(start, stop)], dtype=torch.int64)


def _opened(path: Path) -> list[GgufFile]:
    files: list[GgufFile] = []
    try:
        for shard in shard_paths(path):
            files.append(GgufFile(shard))  # noqa: PERF401 - the files opened so far are closed when one fails
    except BaseException:
        for file in files:
            file.close()
        raise
    return files


def _merged(files: list[GgufFile]) -> dict[str, GgufFile]:
    found: dict[str, GgufFile] = {}
    for file in files:
        for name in file.tensors:
            if name in found:
                raise BadCheckpoint(f"tensor {name!r:.80} is both in {found[name].path.name} and in {file.path.name}")
            found[name] = file
    claimed = files[0].metadata.get("split.tensors.count")
    if claimed is not None and claimed != len(found):
        raise BadCheckpoint(
            f"{files[0].path} and its other shards hold {len(found)} tensors but claim {claimed!r:.20}; one is damaged"
        )
    return found


def _by_name(sources: Iterable[GgufSource], path: Path) -> dict[str, GgufSource]:
    found: dict[str, GgufSource] = {}
    for source in sources:
        if source.name in found:
            raise BadCheckpoint(f"{path}: {source.stored} and {found[source.name].stored} are the same tensor, {source.name}")
        found[source.name] = source
    return found
