"""Tokenizer, chat template, stop tokens and sampling defaults of a model of any format.

Imports no torch: a client of an engine in another process needs only this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from windlass.core.constants import DECODE_ERRORS
from windlass.core.model import Frozen
from windlass.errors import BadInput
from windlass.model.text.chat.template import chat_template, special_tokens
from windlass.model.text.tokenize.build import build_tokenizer
from windlass.model.text.tokenize.tokenizer import Tokenizer, load_tokenizer
from windlass.runtime.weights.files import model_file, own_generation_config


class SamplingDefaults(Frozen):
    """From generation_config.json; None: not given."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True)
class ModelText:
    tokenizer: Tokenizer
    chat_template: str | None
    """None: not a chat model."""
    special_tokens: dict[str, str]
    """bos_token, eos_token...: variables of the chat template."""
    stop_ids: tuple[int, ...]
    """Any of them ends generation."""
    defaults: SamplingDefaults


def model_text(path: Path) -> ModelText:
    """Of a model directory, a .gguf file, or a .m file with its .t file beside it."""
    found = model_file(path)
    if found.is_dir():
        return _of_directory(found)
    return _of_gguf(found) if found.suffix == ".gguf" else _of_dllama(found)


# --- a model directory


def _of_directory(path: Path) -> ModelText:
    if not (path / "tokenizer.json").is_file():
        others = [name for name in ("tokenizer.model", "spiece.model", "vocab.json") if (path / name).is_file()]
        there = f"; {others[0]} alone is not supported" if others else ""
        raise BadInput(f"{path} has no tokenizer.json{there}. Copy it from the original model")
    tokenizer = load_tokenizer(path)
    generation, config = _json(path / "generation_config.json"), _json(path / "config.json")
    stops = _ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id"))
    return ModelText(
        tokenizer=tokenizer,
        chat_template=_template(path, tokenizer.config),
        special_tokens=special_tokens(tokenizer.config),
        stop_ids=_stops(tokenizer, stops),
        defaults=_defaults(generation),
    )


def _template(path: Path, config: Mapping[str, Any]) -> str | None:
    """From chat_template.jinja (newer releases), tokenizer_config.json or chat_template.json."""
    beside = path / "chat_template.jinja"
    if beside.is_file():
        return _text(beside)
    if "chat_template" in config:
        return chat_template(config)
    return chat_template(_json(path / "chat_template.json"))


def _stops(tokenizer: Tokenizer, stops: tuple[int, ...]) -> tuple[int, ...]:
    """Stop tokens of the config files, and the tokenizer's EOS."""
    end = special_tokens(tokenizer.config).get("eos_token")
    number = tokenizer.token_id(end) if end is not None else None
    return tuple(dict.fromkeys((*stops, *(() if number is None else (number,)))))


def _ids(value: object) -> tuple[int, ...]:
    found = cast(list[object], value) if isinstance(value, list) else [value]
    return tuple(number for number in found if isinstance(number, int) and not isinstance(number, bool))


def _defaults(generation: Mapping[str, Any]) -> SamplingDefaults:
    if generation.get("do_sample") is False:
        return SamplingDefaults(temperature=0.0)
    values = {name: generation[name] for name in SamplingDefaults.__struct_fields__ if generation.get(name) is not None}
    try:
        return msgspec.convert(values, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise BadInput(f"generation_config.json: {error}") from None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except DECODE_ERRORS as error:
        raise BadInput(f"{file} is not UTF-8: {error}") from None


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except DECODE_ERRORS as error:
        raise BadInput(f"{file} is not valid JSON: {error}") from None


# --- GGUF

_SAMPLING = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "repetition_penalty": "penalty_repeat"}
"""general.sampling.* (llama.cpp, gguf-py/gguf/constants.py)."""


def _of_gguf(path: Path) -> ModelText:
    from windlass.model.formats.gguf.header import read_header
    from windlass.model.text.tokenize.gguf_tokenizer import tokenizer_files

    metadata = read_header(_first_shard(path)).metadata
    files = tokenizer_files(metadata, str(path))
    config = files["tokenizer_config.json"]
    tokenizer = Tokenizer(build_tokenizer(msgspec.json.encode(files["tokenizer.json"]), f"{path}: its vocabulary"), config)
    ends = (metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    defaults = {name: metadata.get(f"general.sampling.{key}") for name, key in _SAMPLING.items()}
    return ModelText(
        tokenizer=tokenizer,
        chat_template=chat_template(config),
        special_tokens=special_tokens(config),
        stop_ids=tuple(dict.fromkeys(number for number in ends if isinstance(number, int))),
        defaults=_defaults(defaults),
    )


def _first_shard(path: Path) -> Path:
    """Of a split model, the first shard has the vocabulary."""
    import re

    first = path.with_name(re.sub(r"-\d{5}-of-(\d{5})\.gguf$", r"-00001-of-\1.gguf", path.name))
    return first if first.is_file() else path


# --- Distributed Llama


def _of_dllama(path: Path) -> ModelText:
    from windlass.model.formats.dllama.tokenizer import read_tokenizer
    from windlass.runtime.weights.text.dllama import tokenizer_config, tokenizer_json

    file = find_dllama_tokenizer(path)
    if file.is_dir():
        return _of_directory(file)
    stored = read_tokenizer(file)
    config = tokenizer_config(stored)
    return ModelText(
        tokenizer=Tokenizer(build_tokenizer(msgspec.json.encode(tokenizer_json(stored)), f"{file}: its vocabulary"), config),
        chat_template=stored.own_template or None,
        special_tokens=special_tokens(config),
        stop_ids=stored.eos_ids,
        defaults=_defaults(_json(own_generation_config(path))),
    )


def find_dllama_tokenizer(path: Path) -> Path:
    """The .t file named like the .m file; or the only one in its directory; or the directory, if it has a tokenizer.json."""
    named = [path.with_name(path.name.replace("dllama_model_", "dllama_tokenizer_")).with_suffix(".t"), path.with_suffix(".t")]
    for file in named:
        if file.is_file():
            return file
    beside = sorted(path.parent.glob("*.t"))
    if len(beside) == 1:
        return beside[0]
    if (path.parent / "tokenizer.json").is_file():
        return path.parent
    found = f"none of the {len(beside)} .t files next to it has its name" if beside else "there is no .t file next to it"
    raise BadInput(f"{path} needs its tokenizer (.t) file, but {found}; save it as {named[0].name}")
