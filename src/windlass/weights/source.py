"""A checkpoint of whatever format, opened: its tensors under Hugging Face names, what model it is, and the files that come along."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from windlass.core.model import ModelSpec
from windlass.core.ports import TensorStore
from windlass.core.rule import Rule
from windlass.errors import BadInput, Impossible
from windlass.families import describe, hints_from, rules
from windlass.formats.safetensors.files import file_within
from windlass.weights.files import model_file, weight_files
from windlass.weights.tensors.readers import TensorLocation
from windlass.weights.tensors.validate import locate_tensors

# Copied as they are, where the source has them. Everything a tokenizer or a generation needs; no code.
COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja",
    "chat_template.json", "preprocessor_config.json", "LICENSE", "LICENSE.txt", "NOTICE",
)  # fmt: skip


QUANT_METHODS = ("compressed-tensors", "fp8", "mxfp4")
"""Published ways to pack weights that are read here."""


class OpenedModel(msgspec.Struct, frozen=True):
    store: TensorStore
    spec: ModelSpec
    rules: tuple[Rule, ...]
    config: dict[str, Any]
    digest: str
    """Of what the tensors are and where they lie; a resumed conversion must find the same."""
    companions: tuple[Path, ...] = ()
    blocks: Mapping[str, str] = {}
    """Tensors held in blocks that may be carried over: name -> Q4_0 or Q8_0."""
    kind: str = "hf"
    locations: Mapping[str, TensorLocation] = {}
    """Of a model that is to be run: where each of our tensors lies, checked."""
    name: str = ""
    """What the user called it."""
    num_bytes: int = 0
    """Of its files of weights."""


def open_model(path: Path) -> OpenedModel:
    """A model to be run. What cannot be run is refused here, before anything large is read."""
    opened = open_source(path)
    try:
        _check_quantization(opened.config, path)
        check_runnable(opened.spec)
        return msgspec.structs.replace(opened, locations=locate_tensors(opened.rules, opened.store))
    except BaseException:
        opened.store.close()
        raise


def open_source(path: Path) -> OpenedModel:
    """A model to be converted or run."""
    found = model_file(path)
    if found.is_dir():
        return _open_directory(found)
    return _open_gguf(found) if found.suffix == ".gguf" else _open_dllama(found)


def _open_directory(path: Path) -> OpenedModel:
    from windlass.formats.checkpoint import open_store

    store = open_store(path)
    companions = tuple(path / name for name in COMPANIONS if (path / name).is_file())
    for file in companions:
        file_within(path, file.name)  # no link may bring something else along
    return opened_store(store, path, companions, kind="hf")


def opened_store(
    store: TensorStore, path: Path, companions: tuple[Path, ...], kind: str, blocks: Mapping[str, str] | None = None
) -> OpenedModel:
    where = str(path / "config.json" if path.is_dir() else path)
    spec, table = spec_of(store, path.stem if path.is_file() else path.resolve().name, where)
    return OpenedModel(
        store=store,
        spec=spec,
        rules=table,
        config=dict(store.config),
        digest=_digest(store, path),
        companions=companions,
        blocks=blocks or {},
        kind=kind,
        name=str(path),
        num_bytes=sum(file.stat().st_size for file in weight_files(path)),
    )


def spec_of(store: TensorStore, name: str, where: str) -> tuple[ModelSpec, tuple[Rule, ...]]:
    """What model its config and the names of its tensors speak of."""
    config = {key: value for key, value in store.config.items() if key != "quantization_config"}
    spec = describe(config, name, where=where)
    spec = describe(config, spec.name, hints=hints_from(store.names(), spec.num_layers), where=where)
    return spec, rules(spec)


def check_runnable(spec: ModelSpec) -> None:
    if "windlass" not in spec.engines:
        run_by = f"only {', '.join(spec.engines)} can" if spec.engines else "it is described so that its memory can be planned"
        raise Impossible(f"{spec.name or 'this model'} cannot be run here: no engine of ours has its mathematics; {run_by}")


def _check_quantization(config: Mapping[str, Any], path: Path) -> None:
    """Others' ways to pack weights have tensors of their own, which would only be reported as missing."""
    section = config.get("quantization_config")
    method = cast(dict[str, Any], section).get("quant_method") if isinstance(section, dict) else None
    if section is not None and method not in QUANT_METHODS:
        raise BadInput(
            f"{path}: weights packed with quant_method {method!r:.40} are not read; known: {', '.join(QUANT_METHODS)}. "
            "Take the original weights, and `windlass convert` them"
        )


def _digest(store: TensorStore, path: Path) -> str:
    """Names, types, shapes, and when the files were last written: other weights of the same shape are another source."""
    found = hashlib.sha256(msgspec.json.encode(store.config, order="sorted"))
    for name in sorted(store.names()):
        found.update(f"{name} {store.dtype(name)} {store.shape(name)}\n".encode())
    for file in weight_files(path):
        state = file.stat()
        found.update(f"{file.name} {state.st_size} {state.st_mtime_ns}\n".encode())
    return found.hexdigest()


def _open_gguf(path: Path) -> OpenedModel:
    from windlass.weights.stores.gguf import GgufStore

    store = GgufStore(path)
    blocks = {name: kind for name in store.names() if (kind := store.block_type(name)) in ("Q4_0", "Q8_0")}
    return opened_store(store, path, (), kind="gguf", blocks=blocks)


def _open_dllama(path: Path) -> OpenedModel:
    from windlass.weights.stores.dllama import DllamaStore

    store = DllamaStore(path)
    blocks = {name: kind for name in store.names() if (kind := store.block_type(name)) in ("Q4_0", "Q8_0")}
    return opened_store(store, path, (), kind="dllama", blocks=blocks)
