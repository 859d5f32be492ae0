"""Converts a checkpoint to Distributed Llama's model and tokenizer files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from windlass.core.model import Frozen
from windlass.core.scheme import scheme
from windlass.errors import BadInput, Impossible
from windlass.model.formats.disk.atomic import require_free, write_atomically
from windlass.model.formats.dllama.tokenizer import write_tokenizer
from windlass.model.text.tokenize.gguf_tokenizer import write_tokenizer as write_gguf_tokenizer
from windlass.runtime.weights.files import GENERATION_CONFIG, own_generation_config
from windlass.runtime.weights.source import OpenedModel
from windlass.runtime.weights.tensors.readers import reader
from windlass.runtime.weights.text.files import find_dllama_tokenizer
from windlass.tasks.convert.dllama.vocabulary import read_hugging_face
from windlass.tasks.convert.dllama.writer import file_bytes, write_model
from windlass.tasks.convert.outputs import PackingChoices, converted_tensors
from windlass.tasks.convert.validate import locate_sources

WEIGHTS = {"int4": "q40", "int8": "q80", "bf16": "f16", "fp32": "f32"}


class DllamaFiles(Frozen):
    model: str
    tokenizer: str | None
    num_bytes: int
    notes: tuple[str, ...]


def to_dllama(
    opened: OpenedModel, source: Path, out: Path, quant: str, jobs: int, started: Callable[[int], Callable[[int], None]]
) -> DllamaFiles:
    if quant not in WEIGHTS:
        raise Impossible(f"Distributed Llama files cannot store {quant}; use --quant {', '.join(WEIGHTS)}")
    model = _model_path(opened, out, WEIGHTS[quant])
    if model.exists():
        raise BadInput(f"{model} already exists; delete it or choose another output")
    config = {key: value for key, value in opened.config.items() if key != "quantization_config"}
    total = file_bytes(config, WEIGHTS[quant])
    model.parent.mkdir(parents=True, exist_ok=True)
    require_free(model, total)
    planned = converted_tensors(opened.spec, opened.rules, PackingChoices(scheme=scheme("bf16"), mtp=False))
    locations = locate_sources(planned, opened.store, ignore_next_token=True)
    readers = {
        output.name: reader(opened.store, output, locations[output.name]) for output in planned if output.name in locations
    }
    advance = started(total)
    written = write_model(
        model,
        config,
        lambda name, start, stop: readers[name](start, stop),
        WEIGHTS[quant],
        jobs=jobs,
        progress=lambda _, done: advance(done),
    )
    tokenizer, notes = _tokenizer(opened, source, model)
    _copy_generation_config(source, model)
    return DllamaFiles(model=str(model), tokenizer=tokenizer, num_bytes=written.num_bytes, notes=(*written.notes, *notes))


def _model_path(opened: OpenedModel, out: Path, weights: str) -> Path:
    """OUT.m as given; in a directory, the name that Distributed Llama's converter would choose."""
    return out if out.suffix == ".m" else out / f"dllama_model_{opened.spec.name}_{weights}.m"


def _copy_generation_config(source: Path, model: Path) -> None:
    """Sampling defaults, which the format has no place for."""
    found = source / GENERATION_CONFIG if source.is_dir() else own_generation_config(source)
    if found.is_file():
        write_atomically(own_generation_config(model), found.read_bytes())


def _tokenizer(opened: OpenedModel, source: Path, model: Path) -> tuple[str | None, tuple[str, ...]]:
    path = model.with_name(model.name.replace("dllama_model_", "dllama_tokenizer_")).with_suffix(".t")
    if opened.kind == "dllama":
        write_atomically(path, find_dllama_tokenizer(source).read_bytes())
        return str(path), ()
    with TemporaryDirectory() as folder:
        made = _hugging_face_files(opened, source, Path(folder))
        if made is None:
            return None, ("no .t file was written: the source has no tokenizer.json",)
        found, notes = read_hugging_face(made)
    write_tokenizer(path, found)
    return str(path), tuple(notes)


def _hugging_face_files(opened: OpenedModel, source: Path, folder: Path) -> Path | None:
    """The directory that has tokenizer.json: the source's own, or `folder`, where a GGUF file's vocabulary is written out."""
    if opened.kind != "gguf":
        return source if source.is_dir() and (source / "tokenizer.json").is_file() else None
    write_gguf_tokenizer(cast(Any, opened.store).metadata, folder)
    return folder
