"""A checkpoint of a published shape with random int4 weights, in the files that `windlass convert` writes; quickly, and without a GPU.

Codes are slices of one pool of random bytes, each at another place; scales are those of weights that keep activations of the same size.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from engine_speed import shape_of

from windlass.core.scheme import scheme
from windlass.model.bundled.models import find_bundled
from windlass.model.families import rules
from windlass.model.formats.safetensors.shards import FORMAT, OutTensor, header_bytes, plan_shards
from windlass.tasks.convert.outputs import ConvertedTensor, PackingChoices, converted_tensors
from windlass.tasks.convert.quantization import quantization_config

WRITERS = 16
POOL_BYTES = 2**28 + 4097
"""Not a multiple of a row: matrices do not repeat themselves."""
NORMALS = 2**23 + 1009

Piece = tuple[int, int, memoryview]
"""File, offset, bytes."""


def make_checkpoint(folder: Path, name: str, layers: int | None = None) -> None:
    config, spec = shape_of(name, layers)
    how = scheme("int4", 128)
    made = converted_tensors(spec, rules(spec), PackingChoices(scheme=how, mtp=False))
    of = {part.name: one for one in made for part in one.file_tensors}
    final, folder = folder, folder.with_name(folder.name + ".tmp")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    index: dict[str, str] = {}
    numbers = Numbers()
    with ThreadPoolExecutor(WRITERS) as pool:
        for shard in plan_shards(part for one in made for part in one.file_tensors):
            index |= {tensor.name: shard.file for tensor in shard.tensors}
            descriptor = os.open(folder / shard.file, os.O_WRONLY | os.O_CREAT, 0o644)
            header = header_bytes(shard.tensors, FORMAT)
            os.pwrite(descriptor, header, 0)
            os.ftruncate(descriptor, len(header) + shard.num_bytes)
            list(pool.map(lambda piece: _write(*piece), _pieces(descriptor, len(header), shard.tensors, of, numbers)))
            os.close(descriptor)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = {**config, "quantization_config": quantization_config(made, how), "num_nextn_predict_layers": 0}
    (folder / "config.json").write_text(json.dumps(config))
    _tokenizer(folder, spec.vocab_size)
    folder.rename(final)


class Numbers:
    def __init__(self) -> None:
        source = np.random.default_rng(1)
        self._codes = np.frombuffer(source.bytes(POOL_BYTES), np.uint8)
        self._normal = source.standard_normal(NORMALS, np.float32)
        self._at = 0
        self._kept: dict[tuple[object, ...], np.ndarray] = {}

    def of(self, one: ConvertedTensor, part: OutTensor) -> Iterator[memoryview]:
        """Its bytes, a piece after another."""
        if part.name.endswith("weight_packed"):
            yield from self._slices(self._codes, part.num_bytes)
        elif part.name.endswith("weight_shape"):
            yield np.array(one.shape, np.int64).data.cast("B")
        elif part.name.endswith("weight_scale"):
            yield self._constant(1 / (4.6 * one.shape[1] ** 0.5), part)
        elif len(part.shape) == 1:
            yield self._constant(float(part.name.endswith("norm.weight")), part)
        else:
            yield from self._slices(self._normals(part), part.num_bytes)

    def _slices(self, pool: np.ndarray, num_bytes: int) -> Iterator[memoryview]:
        half = pool.nbytes // 32 * 16  # whole numbers
        while num_bytes:
            self._at = (self._at + 7 * 4096 + 16) % half
            size = min(num_bytes, half)
            yield pool.data[self._at : self._at + size]
            num_bytes -= size

    def _normals(self, part: OutTensor) -> np.ndarray:
        key = ("normal", part.dtype, part.shape[-1])
        if key not in self._kept:
            self._kept[key] = _stored(self._normal / part.shape[-1] ** 0.5, part.dtype)
        return self._kept[key]

    def _constant(self, value: float, part: OutTensor) -> memoryview:
        key = (value, part.dtype, part.num_bytes)
        if key not in self._kept:
            size = part.num_bytes // (4 if part.dtype == "F32" else 2)
            self._kept[key] = _stored(np.full(size, value, np.float32), part.dtype)
        return self._kept[key].data


def _stored(numbers: np.ndarray, dtype: str) -> np.ndarray:
    """As bytes; BF16 is the upper half of a float."""
    return np.ascontiguousarray(numbers if dtype == "F32" else (numbers.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)


def _pieces(
    descriptor: int, at: int, tensors: tuple[OutTensor, ...], of: dict[str, ConvertedTensor], numbers: Numbers
) -> Iterator[Piece]:
    for tensor in tensors:
        for data in numbers.of(of[tensor.name], tensor):
            yield descriptor, at, data
            at += len(data)


def _write(descriptor: int, at: int, data: memoryview) -> None:
    while data:
        count = os.pwrite(descriptor, data, at)
        data, at = data[count:], at + count


def _tokenizer(folder: Path, vocab_size: int) -> None:
    """tiny-glm's, with unused tokens added."""
    source = find_bundled("tiny-glm")
    assert source is not None
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(source / name, folder / name)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    used = {*vocab.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocab.update({f"t{number}": number for number in range(vocab_size) if number not in used})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
