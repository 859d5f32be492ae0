"""Exports a trained model as Hugging Face safetensors: published names, sharded files, config and tokenizer.

Tensors are read one by one, so memory holds one stored tensor and its parts. config.json is written last: a directory that has one is
complete. Knows nothing of where the tensors come from (a checkpoint, a model in memory).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec
import torch
from torch import Tensor

from windlass.core.model import Frozen
from windlass.core.rule import ModelPart, Rule, Source, stored_shape
from windlass.core.scheme import Keep
from windlass.errors import BadCheckpoint, BadInput
from windlass.model.families.registry import known_models, published_config
from windlass.model.formats.disk.atomic import require_free, write_atomically, write_errors
from windlass.model.formats.dtypes import torch_dtype
from windlass.model.formats.safetensors.files import file_within
from windlass.model.formats.safetensors.shards import MAX_SHARD_BYTES, OutTensor, SafetensorsShard, plan_shards, write_index
from windlass.model.formats.safetensors.writer import SafetensorsWriter
from windlass.runtime.weights.source import COMPANIONS

DTYPES = {"bf16": ("BF16", "bfloat16"), "fp16": ("F16", "float16"), "fp32": ("F32", "float32")}
"""Names in safetensors and in config.json."""


class TrainedTensors(Protocol):
    def has(self, name: str) -> bool:
        """By our name: `layers.3.ffn.experts.7.gate.weight`."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Whole, on the CPU, [out, in] or [n]."""
        ...


class Exported(Frozen):
    files: dict[str, str]
    """Name -> SHA-256."""
    num_tensors: int
    num_bytes: int
    dtype: str


class _Ours(Frozen):
    """One of our tensors, as a part of a stored one."""

    name: str
    rule: Rule
    source: Source
    expert: int | None


def export_model(
    tensors: TrainedTensors,
    rules: tuple[Rule, ...],
    config: Mapping[str, Any],
    out: Path,
    *,
    dtype: str = "bf16",
    tokenizer: Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[int], None] = lambda _: None,
) -> Exported:
    """`progress` is called with the bytes of each tensor written."""
    if dtype not in DTYPES:
        raise BadInput(f"--dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    stored = _stored(_with_next_token(rules, tensors))
    outputs = [_output(name, parts, dtype) for name, parts in stored.items()]
    shards = plan_shards(outputs, max_shard_bytes)
    _prepare(out, sum(shard.num_bytes for shard in shards))
    files = {shard.file: _write_shard(shard, stored, tensors, out, progress) for shard in shards}
    write_index(out, shards)
    _copy_companions(tokenizer, out)
    has_next = any(rule.part is ModelPart.NEXT_TOKEN for parts in stored.values() for rule in (parts[0].rule,))
    _write_config(config, out, dtype, has_next)
    num_bytes = sum(shard.num_bytes for shard in shards)
    return Exported(files=files, num_tensors=len(outputs), num_bytes=num_bytes, dtype=dtype)


# --- output tensors


def _with_next_token(rules: tuple[Rule, ...], tensors: TrainedTensors) -> tuple[Rule, ...]:
    """A model trained without its MTP layer is exported without it."""
    following = [rule for rule in rules if rule.part is ModelPart.NEXT_TOKEN and rule.copy_of is None]
    if all(tensors.has(name) for rule in following for name, _ in _names(rule)):
        return rules
    return tuple(rule for rule in rules if rule.part is ModelPart.MAIN)


def _stored(rules: tuple[Rule, ...]) -> dict[str, list[_Ours]]:
    """Published name -> our tensors in it, in layer order."""
    found: list[tuple[int, str, _Ours]] = []
    for rule in rules:
        source = _published(rule)
        for name, (layer, expert) in _names(rule):
            where = source.name.format(layer=layer, expert=expert)
            found.append((-1 if layer is None else layer, where, _Ours(name=name, rule=rule, source=source, expert=expert)))
    stored: dict[str, list[_Ours]] = {}
    for _, where, ours in sorted(found, key=lambda one: one[0]):
        stored.setdefault(where, []).append(ours)
    return stored


def _published(rule: Rule) -> Source:
    """Unquantized, and with separate experts, if such names exist."""
    plain = [source for source in rule.sources if not source.encoding]
    return next((source for source in plain if not source.stacked), plain[0])


def _names(rule: Rule) -> Iterator[tuple[str, tuple[int | None, int | None]]]:
    for layer in rule.layers if rule.layers is not None else (None,):
        for expert in range(rule.num_experts) if rule.num_experts else (None,):
            yield rule.ours.format(layer=layer, expert=expert), (layer, expert)


def _output(name: str, parts: list[_Ours], dtype: str) -> OutTensor:
    rule, source = parts[0].rule, parts[0].source
    kind = "F32" if rule.keep is Keep.FLOAT32 else DTYPES[dtype][0]
    return OutTensor(name=name, dtype=kind, shape=stored_shape(rule, source))


# --- writing


def _prepare(out: Path, num_bytes: int) -> None:
    if (out / "config.json").exists() or out.is_file():
        raise BadInput(f"{out} already exists; choose a new directory")
    with write_errors(out, 0):
        out.mkdir(parents=True, exist_ok=True)
    require_free(out, num_bytes)


def _write_shard(
    shard: SafetensorsShard,
    stored: Mapping[str, list[_Ours]],
    tensors: TrainedTensors,
    out: Path,
    progress: Callable[[int], None],
) -> str:
    writer = SafetensorsWriter(out / shard.file, shard.tensors)
    try:
        for output in shard.tensors:
            assembled = _assembled(output, stored[output.name], tensors)
            content: Any = assembled.contiguous().view(torch.uint8).numpy()
            writer.write(output.name, 0, content)
            progress(output.num_bytes)
        return writer.finish()
    except BaseException:
        writer.close()
        raise


def _assembled(output: OutTensor, parts: list[_Ours], tensors: TrainedTensors) -> Tensor:
    whole = torch.empty(output.shape, dtype=torch_dtype(output.dtype))
    for ours in parts:
        value = _value(ours, tensors)
        place = whole[ours.expert] if ours.source.stacked else whole
        place = place.t() if ours.source.transposed else place
        if ours.source.rows is None:
            place.copy_(value)
        else:
            place[[ours.source.rows.stored(row) for row in range(value.shape[0])]] = value.to(place.dtype)
    return whole


def _value(ours: _Ours, tensors: TrainedTensors) -> Tensor:
    name = ours.name if tensors.has(ours.name) else ours.rule.copy_of or ours.name
    if not tensors.has(name):
        raise BadCheckpoint("the checkpoint does not have this tensor of the model", tensor=ours.name)
    value = tensors.tensor(name)
    if tuple(value.shape) != ours.rule.shape:
        raise BadCheckpoint(f"has shape {list(value.shape)}, but the model has {list(ours.rule.shape)}", tensor=ours.name)
    return value


# --- config and tokenizer


def _copy_companions(folder: Path | None, out: Path) -> None:
    """Tokenizer and chat template; no code, no links, no other config."""
    if folder is None:
        return
    found = [name for name in COMPANIONS if (folder / name).is_file()]
    if "tokenizer.json" not in found:
        raise BadInput(f"{folder} has no tokenizer.json; set --tokenizer")
    for name in found:
        with write_errors(out / name, 0):
            shutil.copyfile(file_within(folder, name), out / name)


def _write_config(config: Mapping[str, Any], out: Path, dtype: str, has_next: bool) -> None:
    written = {key: value for key, value in config.items() if key not in ("quantization_config", "dtype")}
    written.setdefault("architectures", _architectures(str(config.get("model_type", ""))))
    written["torch_dtype"] = DTYPES[dtype][1]
    if "num_nextn_predict_layers" in written and not has_next:
        written["num_nextn_predict_layers"] = 0
    if "eos_token_id" not in written and (stop := _stop_token(out)) is not None:
        written["eos_token_id"] = stop
    write_atomically(out / "config.json", msgspec.json.format(msgspec.json.encode(written), indent=2) + b"\n")


def _architectures(model_type: str) -> list[str]:
    """The `architectures` of the family's published models."""
    configs = (published_config(known) for known in known_models())
    return next(
        (list(found["architectures"]) for found in configs if found.get("model_type") == model_type and "architectures" in found),
        [],
    )


def _stop_token(out: Path) -> int | None:
    """The tokenizer's EOS token."""
    file, config = out / "tokenizer.json", out / "tokenizer_config.json"
    if not (file.is_file() and config.is_file()):
        return None
    end: object = msgspec.json.decode(config.read_bytes()).get("eos_token")
    text = cast(dict[str, Any], end).get("content") if isinstance(end, dict) else end
    added: list[dict[str, Any]] = msgspec.json.decode(file.read_bytes()).get("added_tokens", [])
    return next((token["id"] for token in added if token["content"] == text), None)
