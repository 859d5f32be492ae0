"""What a model's files are, from their headers alone: config, tensor names, and how the engine holds their matrices. No torch."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from windlass.core.ggml.forms import held_bits, is_held
from windlass.core.model import Frozen
from windlass.core.scheme import GROUPS, SCHEME_NAMES, Scheme, mixed_file, scheme
from windlass.errors import BadInput

if TYPE_CHECKING:
    from windlass.model.formats.gguf.header import GgufHeader, GgufTensor

SMALLEST_GROUP = 32
GGML_SCHEMES: dict[str, tuple[str, bool]] = {
    "Q4_0": ("int4", False),
    "Q4_1": ("int4", True),
    "Q4_K": ("int4", True),
    "Q5_0": ("int8", False),
    "Q8_0": ("int8", False),
    "F32": ("fp32", False),
}
"""Block type -> the scheme nearest to how the CPU engine holds it, and whether groups have a minimum. Others are held in bf16.
The same table as weights.tensors.storage_format, without torch."""
PLAIN = ("F16", "BF16", "F32")
MEAN_GROUPS = (256, 128, 64, 32)
"""Weights over which the bits of a file that mixes types are a mean."""
DLLAMA_TYPES = {"Q40": "Q4_0", "Q80": "Q8_0", "F16": "F16", "F32": "F32"}


class StoredFiles(Frozen):
    format: str
    """`safetensors`, `gguf`, `dllama` or `config` (no weights)."""
    config: dict[str, Any]
    names: frozenset[str] = frozenset()
    """Of the tensors, as Hugging Face calls them."""
    scheme: Scheme | None = None
    """How the matrices are held on CPUs; None: plain 16-bit numbers, or not known."""
    only_on_cpus: bool = False
    """On GPUs it becomes bf16."""
    label: str = ""
    """The files' own word for it: `Q4_K`, `int4`."""
    digest: str = ""
    num_bytes: int = 0


def stored_files(path: Path) -> StoredFiles:
    """Of a directory, a .gguf or .m file, or a config.json."""
    from windlass.runtime.weights.files import model_file

    found = model_file(path) if path.is_dir() or path.suffix in (".gguf", ".m") else path
    if found.suffix == ".gguf" and found.is_file():
        return _gguf(found)
    return _dllama(found) if found.suffix == ".m" and found.is_file() else _directory(path)


# --- directories


def _directory(path: Path) -> StoredFiles:
    from windlass.model.formats.checkpoint import digest, tensor_names
    from windlass.model.formats.config import read_config

    config = read_config(path)
    if {"layout", "scheme", "ranks"} <= config.keys():
        raise BadInput(f"{path} is a saved plan, not a model; pass it with --plan")
    names, how = tensor_names(path), config_scheme(config)
    return StoredFiles(
        format="safetensors" if names else "config",
        config=config,
        names=names,
        scheme=how,
        label=how.name if how else "",
        digest=digest(path),
        num_bytes=_size(path),
    )


def config_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """Of quantization_config; None for plain numbers, and for methods that are not ours."""
    from windlass.open.scheme import stored_scheme

    name, group = stored_scheme(dict(config))
    if name in ("awq", "gptq"):
        return _column_packed(cast(dict[str, Any], config["quantization_config"]))
    if name not in SCHEME_NAMES or name in ("bf16", "mxfp4"):
        return None  # mxfp4 is described by its family
    return scheme(name, group, zero_points=_asymmetric(config))


def _column_packed(section: dict[str, Any]) -> Scheme | None:
    """AWQ and GPTQ: 4 bits; groups that are not ours count as the nearest."""
    group = section.get("group_size", section.get("q_group_size"))
    symmetric = section.get("sym") is True or section.get("zero_point") is False
    return scheme("int4", group if group in GROUPS else max(GROUPS), zero_points=not symmetric)


def _asymmetric(config: Mapping[str, Any]) -> bool:
    """Valid by now: `stored_scheme` has read it."""
    section = cast(dict[str, Any], config["quantization_config"])
    groups = cast(dict[str, dict[str, Any]], section.get("config_groups", {}))
    return any(cast(dict[str, Any], group.get("weights") or {}).get("symmetric") is False for group in groups.values())


# --- GGUF


def _gguf(path: Path) -> StoredFiles:
    from windlass.model.families.gguf.config import gguf_config
    from windlass.model.families.gguf.names import architecture_of, gguf_sources
    from windlass.model.formats.gguf.header import read_header
    from windlass.runtime.weights.files import weight_files

    files = weight_files(path)
    headers = {file: read_header(file) for file in files}
    first, tensors = headers[files[0]], _all_tensors(headers.values())
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    config = gguf_config(first.metadata, shapes, _rope_factors(headers), str(path))
    _, architecture = architecture_of(first.metadata, str(path))
    names = frozenset(source.name for source in gguf_sources(architecture, shapes, config["head_dim"], str(path)))
    kind = main_type(tensors.values())
    return StoredFiles(
        format="gguf",
        config=config,
        names=names,
        scheme=_file_scheme(kind, tensors.values()),
        label=kind,
        digest=_digest(files, [f"{name} {one.shape} {one.type.name}" for name, one in sorted(tensors.items())]),
        num_bytes=sum(file.stat().st_size for file in files),
    )


def _all_tensors(headers: Iterable[GgufHeader]) -> dict[str, GgufTensor]:
    return {name: tensor for header in headers for name, tensor in header.tensors.items()}


def main_type(tensors: Iterable[GgufTensor]) -> str:
    """The block type of most weights of the layers' matrices."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.name.startswith("blk.") and len(tensor.shape) > 1:
            sizes[tensor.type.name] += tensor.num_rows * tensor.shape[-1]
    return max(sizes, key=sizes.__getitem__) if sizes else "F32"


def _file_scheme(kind: str, tensors: Iterable[GgufTensor]) -> Scheme | None:
    """By the bits that its matrices really have, embedding and head included; None: plain 16-bit numbers."""
    matrices = [tensor for tensor in tensors if len(tensor.shape) > 1]
    if kind in PLAIN or not all(is_held(tensor.type.name) for tensor in matrices):
        return ggml_scheme(kind)
    sizes = [tensor.num_rows * tensor.shape[-1] for tensor in matrices]
    bits = sum(held_bits(tensor.type.name) * size for tensor, size in zip(matrices, sizes, strict=True)) / sum(sizes)
    divides = (group for group in MEAN_GROUPS if all(tensor.shape[-1] % group == 0 for tensor in matrices))
    return mixed_file(kind.lower(), bits, next(divides, MEAN_GROUPS[0]))


def ggml_scheme(kind: str) -> Scheme | None:
    """How the CPU engine holds blocks of that type; None: bf16."""
    if kind not in GGML_SCHEMES:
        return None
    name, minima = GGML_SCHEMES[kind]
    return scheme(name, SMALLEST_GROUP, zero_points=minima)


def _rope_factors(headers: Mapping[Path, GgufHeader]) -> list[float]:
    """The tensor rope_freqs.weight, which is F32 in every file that has it."""
    for file, header in headers.items():
        tensor = header.tensors.get("rope_freqs.weight")
        if tensor is not None and tensor.type.name == "F32":
            with file.open("rb") as stream:
                stream.seek(tensor.start)
                return list(struct.unpack(f"<{tensor.shape[-1]}f", stream.read(4 * tensor.shape[-1])))
    return []


# --- Distributed Llama


def _dllama(path: Path) -> StoredFiles:
    from windlass.model.families.dllama.header import config_from
    from windlass.model.formats.dllama.file import read_header, read_weight_type

    header = read_header(path)
    kind = DLLAMA_TYPES[read_weight_type(path, header).name]
    return StoredFiles(
        format="dllama",
        config=config_from(header.values, f"{path} header"),
        scheme=ggml_scheme(kind),
        only_on_cpus=True,
        label=kind,
        digest=_digest([path], [f"{name} {value}" for name, value in header.values.items()]),
        num_bytes=path.stat().st_size,
    )


# --- identity


def _digest(files: Iterable[Path], lines: Iterable[str]) -> str:
    """Over what the headers say and the size of the files; the weights themselves are too large to read."""
    sizes = [f"{file.name} {file.stat().st_size}" for file in files]
    return hashlib.sha256("\n".join([*lines, *sizes]).encode()).hexdigest()


def _size(path: Path) -> int:
    from windlass.runtime.weights.files import weight_files

    return sum(file.stat().st_size for file in weight_files(path)) if path.is_dir() else 0
