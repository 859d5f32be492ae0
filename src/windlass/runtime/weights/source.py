"""Opens a checkpoint of any format: tensors under their Hugging Face names, the ModelSpec, and tokenizer files."""

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
from windlass.model.families import describe, hints_from, rules
from windlass.model.formats.safetensors.files import file_within
from windlass.runtime.weights.files import model_file, weight_files
from windlass.runtime.weights.tensors.readers import TensorLocation
from windlass.runtime.weights.tensors.validate import locate_tensors

# Copied unchanged by conversion: tokenizer, chat template, generation settings, licence. No code.
COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja",
    "chat_template.json", "preprocessor_config.json", "LICENSE", "LICENSE.txt", "NOTICE",
)  # fmt: skip


QUANT_METHODS = ("compressed-tensors", "fp8", "mxfp4", "awq", "gptq")
"""quant_method values of published checkpoints that are supported."""


class OpenedModel(msgspec.Struct, frozen=True):
    store: TensorStore
    spec: ModelSpec
    rules: tuple[Rule, ...]
    config: dict[str, Any]
    digest: str
    """Of tensor names, dtypes, shapes and file times; a resumed conversion requires the same."""
    companions: tuple[Path, ...] = ()
    blocks: Mapping[str, str] = {}
    """Tensors stored as Q4_0 or Q8_0, whose codes conversion can copy: name -> block type."""
    kind: str = "hf"
    locations: Mapping[str, TensorLocation] = {}
    """Where each of our tensors is stored, validated; only set by `open_model`."""
    name: str = ""
    """As the user gave it."""
    num_bytes: int = 0
    """Of its weight files."""


def open_model(path: Path) -> OpenedModel:
    """A model to run. Raises here, before any weights are read, if it cannot be run."""
    opened = open_source(path)
    try:
        _check_quantization(opened.config, path)
        check_runnable(opened.spec)
        return msgspec.structs.replace(opened, locations=locate_tensors(opened.rules, opened.store))
    except BaseException:
        opened.store.close()
        raise


def open_source(path: Path) -> OpenedModel:
    """A model to convert or run."""
    found = model_file(path)
    if found.is_dir():
        return _open_directory(found)
    return _open_gguf(found) if found.suffix == ".gguf" else _open_dllama(found)


def _open_directory(path: Path) -> OpenedModel:
    from windlass.model.formats.checkpoint import open_store

    store = _with_rows(open_store(path))
    companions = tuple(path / name for name in COMPANIONS if (path / name).is_file())
    for file in companions:
        file_within(path, file.name)  # refuses links that lead out of the directory
    return opened_store(store, path, companions, kind="hf")


def _with_rows(store: TensorStore) -> TensorStore:
    """AWQ and GPTQ matrices, which are stored by column, by row."""
    section = store.config.get("quantization_config")
    if not isinstance(section, dict) or cast(dict[str, Any], section).get("quant_method") not in ("awq", "gptq"):
        return store
    from windlass.runtime.weights.stores.column_packed import ColumnPackedStore

    return ColumnPackedStore(store, cast(dict[str, Any], section))


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
    """The ModelSpec and rules, from the config and the tensor names."""
    config = {key: value for key, value in store.config.items() if key != "quantization_config"}
    spec = describe(config, name, where=where)
    spec = describe(config, spec.name, hints=hints_from(store.names(), spec.num_layers), where=where)
    return spec, rules(spec)


def check_runnable(spec: ModelSpec) -> None:
    if "windlass" not in spec.engines:
        run_by = f"use {', '.join(spec.engines)}" if spec.engines else "it is supported for planning only"
        raise Impossible(f"{spec.name or 'this model'} cannot be run: Windlass does not implement its architecture; {run_by}")


def _check_quantization(config: Mapping[str, Any], path: Path) -> None:
    """Named here, since tensors of other quantization methods would only be reported as missing."""
    section = config.get("quantization_config")
    method = cast(dict[str, Any], section).get("quant_method") if isinstance(section, dict) else None
    if section is not None and method not in QUANT_METHODS:
        raise BadInput(
            f"{path}: quant_method {method!r:.40} is not supported (supported: {', '.join(QUANT_METHODS)}); "
            "use the original weights and `windlass convert`"
        )


def _digest(store: TensorStore, path: Path) -> str:
    """Names, dtypes, shapes and modification times, so that other weights of the same shape differ."""
    found = hashlib.sha256(msgspec.json.encode(store.config, order="sorted"))
    found.update("".join(f"{name} {store.dtype(name)} {store.shape(name)}\n" for name in sorted(store.names())).encode())
    for file in weight_files(path):
        state = file.stat()
        found.update(f"{file.name} {state.st_size} {state.st_mtime_ns}\n".encode())
    return found.hexdigest()


def _open_gguf(path: Path) -> OpenedModel:
    from windlass.runtime.weights.stores.gguf import GgufStore

    store = GgufStore(path)
    blocks = {name: kind for name in store.names() if (kind := store.block_type(name)) in ("Q4_0", "Q8_0")}
    return opened_store(store, path, (), kind="gguf", blocks=blocks)


def _open_dllama(path: Path) -> OpenedModel:
    from windlass.runtime.weights.stores.dllama import DllamaStore

    store = DllamaStore(path)
    blocks = {name: kind for name in store.names() if (kind := store.block_type(name)) in ("Q4_0", "Q8_0")}
    return opened_store(store, path, (), kind="dllama", blocks=blocks)
