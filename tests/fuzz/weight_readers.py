"""Readers of files with weights. They need torch."""

from __future__ import annotations

import io
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fuzz import made_models as made
from fuzz.mutate import Sample, mutate_json, mutate_safetensors
from fuzz.reader import Reader, put

MAX_TENSORS = 40


def _read_store(store: Any) -> None:
    try:
        for name in list(store.names())[:MAX_TENSORS]:
            shape, _ = store.shape(name), store.dtype(name)
            rows = 1
            for size in shape[:-1] or shape:
                rows *= size
            store.read(name, 0, min(rows, 64))
    finally:
        store.close()


# --- GGUF

KINDS = ("F16", "Q8_0", "Q4_0")


def _gguf_samples(folder: Path) -> list[Sample]:
    return [made.cut_gguf(made.gguf_file(folder, kind)) for kind in KINDS]


def read_gguf_rows(data: bytes, folder: Path) -> None:
    """Every tensor of the file as numbers, whatever model it is of."""
    from windlass.model.formats.gguf.file import GgufFile

    file = GgufFile(put(folder, "x.gguf", data))
    try:
        for name, tensor in list(file.tensors.items())[:MAX_TENSORS]:
            rows = tensor.shape[0] if len(tensor.shape) == 1 else min(tensor.num_rows, 64)
            file.read(name, 0, rows)
    finally:
        file.close()


def read_gguf_model(data: bytes, folder: Path) -> None:
    from windlass.model import families
    from windlass.runtime.weights.stores.gguf import GgufStore

    store = GgufStore(put(folder, "x.gguf", data))
    families.rules(families.describe(store.config))
    _read_store(store)


def _block_samples(folder: Path) -> list[Sample]:
    """One tensor of each type of block: random bytes."""
    from random import Random

    from windlass.model.formats.gguf.blocks import DEQUANTIZE
    from windlass.model.formats.gguf.header import TYPES
    from windlass.model.formats.gguf.writer import GgufOutput, header_bytes

    random, found = Random(0), list[Sample]()
    plain = header_bytes({"general.architecture": "llama"}, [GgufOutput(name="t", shape=(2, 256), type="F32")])
    for number, kind in TYPES.items():
        if kind.name in DEQUANTIZE:
            blocks = random.randbytes(2 * 256 // kind.elements * kind.num_bytes)
            found.append(made.cut_gguf(_with_type(plain, number) + blocks))
    return found


def _with_type(header: bytes, number: int) -> bytes:
    parts = list(made.cut_gguf(header))
    at = parts.index(b"t") + 4  # its number of dimensions, two of them, its type
    parts[at] = number.to_bytes(4, "little")
    return b"".join(parts)


# --- safetensors


def _safetensors_samples(folder: Path) -> list[Sample]:
    model = made.write_model(folder / "st")
    odd = made.safetensors_bytes(
        {"a": ("F32", [2, 2], bytes(16)), "b": ("I8", [5], bytes(5)), "c": ("F8_E4M3", [0, 3], b""), "d": ("BOOL", [], b"\1")},
        {"format": "pt"},
    )
    return [made.cut_safetensors((model / "model.safetensors").read_bytes()), made.cut_safetensors(odd)]


def read_safetensors(data: bytes, folder: Path) -> None:
    from windlass.model.formats.checkpoint import open_store, tensor_names

    put(folder / "st", "model.safetensors", data)
    tensor_names(folder / "st")
    _read_store(open_store(folder / "st"))


def _index_samples(folder: Path) -> list[Sample]:
    made.write_model(folder / "indexed")
    return [(made.write_index(folder),)]


def read_index(data: bytes, folder: Path) -> None:
    from windlass.model.formats.checkpoint import open_store, tensor_names

    put(folder / "indexed", "model.safetensors.index.json", data)
    tensor_names(folder / "indexed")
    _read_store(open_store(folder / "indexed"))


# --- PyTorch's


def _torch_samples(folder: Path) -> list[Sample]:
    import torch

    made.write_text(folder / "bin")
    stream = io.BytesIO()
    torch.save({"a.weight": torch.ones(2, 3), "b": torch.zeros(4).bfloat16()}, stream)
    return [made.cut_every(stream.getvalue(), 8)]


def read_torch(data: bytes, folder: Path) -> None:
    from windlass.model.formats.torch_bin import TorchStore

    put(folder / "bin", "pytorch_model.bin", data)
    _read_store(TorchStore(folder / "bin"))


def _contents_samples(folder: Path) -> list[Sample]:
    import torch
    import torch.distributed.checkpoint as dcp

    from windlass.tasks.train.checkpoint.storage import CheckedWriter

    state = {"model": {"a": torch.ones(2, 3), "b": torch.zeros(4)}, "step": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(state, storage_writer=CheckedWriter(folder / "dcp"), no_dist=True)
    return [made.cut_every((folder / "dcp" / ".metadata").read_bytes(), 4)]


def read_contents(data: bytes, folder: Path) -> None:
    """The table of contents of a training checkpoint, which is a pickle."""
    from windlass.tasks.train.checkpoint.storage import SafeReader

    put(folder / "dcp", ".metadata", data)
    SafeReader(folder / "dcp").read_metadata()


# --- Distributed Llama


def _dllama_samples(folder: Path) -> list[Sample]:
    return [made.cut_pairs(made.dllama_files(folder, quant)[0]) for quant in ("int4", "int8")]


def read_dllama(data: bytes, folder: Path) -> None:
    from windlass.runtime.weights.stores.dllama import DllamaStore

    _read_store(DllamaStore(put(folder, "x.m", data)))


# --- adapters


def _adapter(folder: Path) -> tuple[bytes, bytes]:
    import json

    from windlass.runtime.weights.adapters import published_matrices

    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "target_modules": ["q_proj"], "use_rslora": False}
    tensors: dict[str, tuple[str, Sequence[int], bytes]] = {}
    for name, (_, (out, into)) in list(published_matrices(made.rules()).items())[:3]:
        tensors[f"base_model.model.{name}.lora_A.weight"] = "F32", [2, into], bytes(8 * into)
        tensors[f"base_model.model.{name}.lora_B.weight"] = "F32", [out, 2], bytes(8 * out)
    files = json.dumps(config).encode(), made.safetensors_bytes(tensors, {"format": "pt"})
    (folder / "adapter").mkdir(exist_ok=True)
    for name, data in zip(("adapter_config.json", "adapter_model.safetensors"), files, strict=True):
        put(folder / "adapter", name, data)
    return files


def _read_adapter(name: str) -> Callable[[bytes, Path], None]:
    def read(data: bytes, folder: Path) -> None:
        from windlass.runtime.weights.adapters import read_adapter
        from windlass.tasks.serve.lora.files import take_adapter

        put(folder / "adapter", name, data)
        shutil.rmtree(folder / "taken", ignore_errors=True)
        take_adapter(folder, "adapter", folder / "taken")
        read_adapter(folder / "taken", made.rules())

    return read


READERS: dict[str, Reader] = {
    "gguf-rows": Reader(_gguf_samples, read_gguf_rows, is_heavy=True),
    "gguf-blocks": Reader(_block_samples, read_gguf_rows, is_heavy=True),
    "gguf-model": Reader(_gguf_samples, read_gguf_model, is_heavy=True),
    "safetensors": Reader(_safetensors_samples, read_safetensors, mutate_safetensors, is_heavy=True),
    "safetensors-index": Reader(_index_samples, read_index, mutate_json, is_heavy=True),
    "torch-bin": Reader(_torch_samples, read_torch, is_heavy=True),
    "checkpoint-contents": Reader(_contents_samples, read_contents, is_heavy=True),
    "dllama-model": Reader(_dllama_samples, read_dllama, is_heavy=True),
    "adapter-config": Reader(
        lambda folder: [(_adapter(folder)[0],)], _read_adapter("adapter_config.json"), mutate_json, is_heavy=True
    ),
    "adapter-weights": Reader(
        lambda folder: [made.cut_safetensors(_adapter(folder)[1])],
        _read_adapter("adapter_model.safetensors"),
        mutate_safetensors,
        is_heavy=True,
    ),
}
