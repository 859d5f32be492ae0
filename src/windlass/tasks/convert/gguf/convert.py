"""Converts a checkpoint of any format to one GGUF file. Memory use is that of the slices in flight, whatever the model's size."""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from io import BufferedWriter
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch

from windlass.core.model import Frozen, ModelSpec
from windlass.core.scheme import scheme
from windlass.errors import BadInput
from windlass.model.families.gguf.write import GgufTarget, metadata_of, rope_factors, target_of
from windlass.model.formats.disk.atomic import require_free
from windlass.model.formats.gguf.encode import encode
from windlass.model.formats.gguf.writer import GgufOutput, header_bytes, padded
from windlass.runtime.weights.source import OpenedModel
from windlass.runtime.weights.tensors.readers import reader
from windlass.tasks.convert.gguf.recipe import FILE_TYPES, block_type
from windlass.tasks.convert.outputs import ConvertedTensor, PackingChoices, converted_tensors
from windlass.tasks.convert.validate import locate_sources
from windlass.units import MIB

SLICE_ELEMENTS = 2**18
"""Weights that are read and quantized at a time: so few that what a search for scales makes of them stays in a core's cache (Q4_K: 0.09 s per
million weights; 0.29 with four times as many)."""
IN_FLIGHT = 2
"""Slices per thread that are being read, quantized or waiting to be written."""
KEPT_BYTES = 64 * MIB
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of mallopt(3)."""
ROPE_FACTORS = "rope_freqs.weight"

ReadRows = Callable[[int, int], torch.Tensor]


class GgufModel(Frozen):
    model: str
    type: str
    num_bytes: int
    notes: tuple[str, ...] = ()


class Part(Frozen):
    """Consecutive rows of a tensor of the file: all of it, or one expert of a stacked one."""

    source: str
    target: GgufTarget
    shape: tuple[int, ...]


def to_gguf(
    opened: OpenedModel, out: Path, kind: str, started: Callable[[int], Callable[[int], None]], jobs: int = 0
) -> GgufModel:
    """`kind`: a key of FILE_TYPES. `out`: the file, or a directory to put it in. `jobs`: threads; 0: one per core."""
    if kind not in FILE_TYPES:
        raise BadInput(f"GGUF files are written as {', '.join(FILE_TYPES)}, not {kind!r}")
    spec = msgspec.structs.replace(opened.spec, next_token=None)
    file = out if out.suffix == ".gguf" else out / f"{spec.name}-{kind}.gguf"
    if file.exists():
        raise BadInput(f"{file} already exists; delete it or choose another output")
    planned = converted_tensors(opened.spec, opened.rules, PackingChoices(scheme=scheme("bf16"), mtp=False))
    locations = locate_sources(planned, opened.store, ignore_next_token=True)
    planned = tuple(one for one in planned if one.name in locations and not (one.rule.copy_of is not None and spec.tied_head))
    readers = {one.name: reader(opened.store, one, locations[one.name]) for one in planned}
    parts = _parts(planned, spec)
    tensors = _tensors(parts, spec, kind)
    tokenizer, notes = _tokenizer(opened)
    metadata = metadata_of(spec) | {"general.file_type": FILE_TYPES[kind]} | tokenizer
    header = header_bytes(metadata, tensors)
    total = sum(padded(tensor.num_bytes) for tensor in tensors)
    file.parent.mkdir(parents=True, exist_ok=True)
    require_free(file, len(header) + total)
    _write(file, header, tensors, parts, readers, spec, started(total), jobs or len(os.sched_getaffinity(0)))
    return GgufModel(model=str(file), type=kind, num_bytes=file.stat().st_size, notes=notes)


def _parts(planned: tuple[ConvertedTensor, ...], spec: ModelSpec) -> dict[str, list[Part]]:
    """By tensor of the file; experts in their order."""
    found: dict[str, list[Part]] = {}
    for one in planned:
        target = target_of(one.name, spec)
        found.setdefault(target.name, []).append(Part(source=one.name, target=target, shape=one.shape))
    for parts in found.values():
        parts.sort(key=lambda part: part.target.expert or 0)
    return found


def _tensors(parts: Mapping[str, list[Part]], spec: ModelSpec, kind: str) -> list[GgufOutput]:
    made = [
        GgufOutput(name=name, shape=_shape(of), type=block_type(name, _shape(of), kind, spec.num_layers, spec.tied_head))
        for name, of in parts.items()
    ]
    factors = rope_factors(spec)
    return [*made, GgufOutput(name=ROPE_FACTORS, shape=(len(factors),), type="F32")] if factors else made


def _shape(parts: list[Part]) -> tuple[int, ...]:
    return parts[0].shape if parts[0].target.expert is None else (len(parts), *parts[0].shape)


def _write(
    file: Path,
    header: bytes,
    tensors: list[GgufOutput],
    parts: Mapping[str, list[Part]],
    readers: Mapping[str, ReadRows],
    spec: ModelSpec,
    advance: Callable[[int], None],
    jobs: int,
) -> None:
    """Under a temporary name until it is complete."""
    partial, threads = file.with_name(file.name + ".partial"), torch.get_num_threads()
    _keep_freed_memory()
    # One core per slice, as convert.dllama.writer does it.
    pool = ThreadPoolExecutor(jobs, initializer=torch.set_num_threads, initargs=(1,))
    try:
        with partial.open("wb") as stream:
            stream.write(header)
            for tensor in tensors:
                _write_tensor(stream, tensor, parts.get(tensor.name, []), readers, spec, advance, pool, IN_FLIGHT * jobs)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(file)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
        partial.unlink(missing_ok=True)


def _keep_freed_memory() -> None:
    """Else glibc returns the buffers of every slice to the system and asks for them again: half of the time went into page faults."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, KEPT_BYTES // 4)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def _write_tensor(
    stream: BufferedWriter,
    tensor: GgufOutput,
    parts: list[Part],
    readers: Mapping[str, ReadRows],
    spec: ModelSpec,
    advance: Callable[[int], None],
    pool: ThreadPoolExecutor,
    in_flight: int,
) -> None:
    if tensor.name == ROPE_FACTORS:
        stream.write(encode(torch.tensor([rope_factors(spec)]), "F32").data)
    pending: deque[Future[np.ndarray]] = deque()
    for part in parts:
        for start, stop in _ranges(part):
            pending.append(pool.submit(_encoded, part, readers[part.source], start, stop, tensor.type))
            if len(pending) > in_flight:
                _write_next(stream, pending, advance)
    while pending:
        _write_next(stream, pending, advance)
    stream.write(b"\0" * (padded(tensor.num_bytes) - tensor.num_bytes))


def _write_next(stream: BufferedWriter, pending: deque[Future[np.ndarray]], advance: Callable[[int], None]) -> None:
    data = pending.popleft().result()
    stream.write(data.data)
    advance(data.nbytes)


def _ranges(part: Part) -> Iterator[tuple[int, int]]:
    """Rows that are read together; whole heads where their order differs. A vector is one."""
    if len(part.shape) == 1:
        yield 0, part.shape[0]
        return
    unit = part.target.order.head_dim if part.target.order else 1
    step = max(SLICE_ELEMENTS // (part.shape[1] * unit), 1) * unit
    for start in range(0, part.shape[0], step):
        yield start, min(start + step, part.shape[0])


def _encoded(part: Part, read: ReadRows, start: int, stop: int, kind: str) -> np.ndarray:
    rows = read(start, stop)
    if len(part.shape) == 1:
        return encode(rows.reshape(1, -1), kind)
    return encode(rows if part.target.order is None else rows[_file_order(part.target, len(rows))], kind)


def _file_order(target: GgufTarget, count: int) -> torch.Tensor:
    """Index into Hugging Face rows, by row of the file."""
    assert target.order is not None
    stored = torch.tensor([target.order.stored(row) for row in range(count)])
    return torch.argsort(stored)


# --- the tokenizer


def _tokenizer(opened: OpenedModel) -> tuple[dict[str, Any], tuple[str, ...]]:
    if opened.kind == "gguf":
        metadata = cast(Any, opened.store).metadata
        return {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}, ()
    from windlass.model.text.tokenize.gguf_export import tokenizer_metadata
    from windlass.runtime.weights.text.files import model_text

    try:
        text = model_text(Path(opened.name))
    except BadInput as error:
        return {}, (f"written without a tokenizer, so that only other programs' token ids work: {error}",)
    values = msgspec.json.decode(text.tokenizer.backend.to_str(), type=dict[str, Any])
    found, notes = tokenizer_metadata(values, text.tokenizer.config, opened.spec.vocab_size, text.chat_template)
    return found | _stops(text.stop_ids, found), notes


def _stops(stop_ids: tuple[int, ...], tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """All stop tokens: GGUF has a key each for the end of text, of a turn and of a message."""
    keys = [f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom")]
    left = [stop for stop in stop_ids if stop not in {tokenizer.get(key) for key in keys}]
    return dict(zip([key for key in keys if key not in tokenizer], left, strict=False))
