"""Output of `windlass models`."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
from rich.table import Table

from windlass.cli.console import console, working
from windlass.core.model import Attention, Convolution, LatentAttention, ModelSpec
from windlass.core.rule import Rule
from windlass.model.bundled.models import bundled_names
from windlass.model.families import rules
from windlass.model.families.registry import KnownModel, known_models, spec_of
from windlass.open.resolve import ModelDescription, describe_model
from windlass.open.stored import StoredFiles
from windlass.tasks.plan.inference.assemble import model_facts
from windlass.tasks.plan.inference.smallest import smallest_hardware
from windlass.units import format_bytes, format_context, format_count


def print_json(value: object) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def registry_rows(filter_by: str) -> list[dict[str, Any]]:
    wanted = filter_by.lower()
    with working("planning the smallest hardware of every model"):
        rows = [_row(model) for model in known_models() if any(wanted in name.lower() for name in model.names())]
        rows += [_bundled_row(name) for name in bundled_names() if wanted in name.lower()]
    return sorted(rows, key=lambda row: row["parameters"])


def _bundled_row(name: str) -> dict[str, Any]:
    """It comes with Windlass: nothing is downloaded."""
    found = describe_model(name)
    return {
        **msgspec.to_builtins(model_facts(found.spec, found.rules)),
        "hub": None,
        "context_tokens": found.spec.context_tokens,
        "smallest_hardware": smallest_hardware(found.spec, found.rules),
        "config_check": "bundled",
        "note": "comes with Windlass: try it without a download",
    }


def _row(model: KnownModel) -> dict[str, Any]:
    spec = spec_of(model)
    its_rules = rules(spec)
    facts = model_facts(spec, its_rules)
    return {
        **msgspec.to_builtins(facts),
        "hub": model.hub,
        "context_tokens": spec.context_tokens,
        "smallest_hardware": smallest_hardware(spec, its_rules),
        "config_check": model.check,
        "note": model.note,
    }


def print_registry(rows: list[dict[str, Any]]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name, right in (
        ("model", 0),
        ("family", 0),
        ("total", 1),
        ("active", 1),
        ("context", 1),
        ("KV / token", 1),
        ("smallest hardware (8k context)", 0),
    ):
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for row in rows:
        active = format_count(row["active_parameters"]) if row["active_parameters"] != row["parameters"] else "dense"
        table.add_row(
            row["name"],
            row["family"],
            format_count(row["parameters"]),
            active,
            format_context(row["context_tokens"]),
            format_bytes(row["kv_bytes_per_token"]),
            row["smallest_hardware"],
        )
    console().print(table)
    console().print(
        f"\n{len(rows)} models. `windlass models show NAME` for details, `windlass plan NAME` for hardware requirements."
    )


def model_json(resolved: ModelDescription, tensors: bool) -> dict[str, Any]:
    made = {
        "facts": model_facts(resolved.spec, resolved.rules),
        "spec": resolved.spec,
        "source": resolved.source,
        "smallest_hardware": smallest_hardware(resolved.spec, resolved.rules),
        "files": None if resolved.files is None else _files_json(resolved.files),
    }
    return {**made, "rules": resolved.rules} if tensors else made


def _files_json(files: StoredFiles) -> dict[str, Any]:
    return {"format": files.format, "scheme": files.scheme, "stored_as": files.label, "num_bytes": files.num_bytes}


def print_model(resolved: ModelDescription, tensors: bool) -> None:
    spec, facts = resolved.spec, model_facts(resolved.spec, resolved.rules)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    for name, value in (
        ("model", f"{spec.name} ({resolved.source})"),
        ("family", f"{spec.family} (runs in {', '.join(spec.engines) or 'no engine: planning only'})"),
        ("parameters", f"{facts.parameters:,} ({format_count(facts.parameters)})"),
        ("active per token", f"{facts.active_parameters:,}"),
        ("checkpoint parameters", f"{facts.checkpoint_parameters:,}{', with an MTP layer' if spec.next_token else ''}"),
        ("published as", spec.native_scheme),
        *_files(resolved),
        ("layers", _layers(spec)),
        ("hidden, vocabulary", f"{spec.hidden_size:,}, {spec.vocab_size:,}{', tied head' if spec.tied_head else ''}"),
        ("attention", _attention(spec)),
        ("positions", _positions(spec)),
        ("context", f"{spec.context_tokens:,} tokens"),
        ("KV cache", f"{facts.kv_bytes_per_token:,} bytes per token in bf16"),
        ("smallest hardware", smallest_hardware(spec, resolved.rules)),
    ):
        table.add_row(name, value)
    console().print(table)
    if tensors:
        console().print(_tensor_table(resolved.rules))


def _files(resolved: ModelDescription) -> list[tuple[str, str]]:
    files = resolved.files
    if files is None or files.format == "config":
        return []
    held = "" if files.scheme is None else f", held as {files.scheme.name} in groups of {files.scheme.group}"
    where = " on CPUs, as bf16 on GPUs" if files.scheme is not None and files.only_on_cpus else ""
    return [("files", f"{files.format}, {format_bytes(files.num_bytes)}, {files.label or 'plain numbers'}{held}{where}")]


def _layers(spec: ModelSpec) -> str:
    moe = spec.moe_layers
    if not moe:
        return f"{spec.num_layers}, dense"
    shared = ", one shared" if moe[0].shared_intermediate_size else ""
    experts = f"{moe[0].num_experts} experts of {moe[0].intermediate_size} (top {moe[0].num_active}{shared})"
    return f"{spec.num_layers}: {spec.num_layers - len(moe)} dense, {len(moe)} with {experts}"


def _attention(spec: ModelSpec) -> str:
    mixers = {layer.mixer for layer in spec.layers}
    texts: list[str] = []
    for mixer in mixers:
        if isinstance(mixer, Attention):
            window = f", window {mixer.window}" if mixer.window else ""
            texts.append(f"{mixer.num_heads} heads, {mixer.num_kv_heads} KV heads of {mixer.head_dim}{window}")
        elif isinstance(mixer, LatentAttention):
            texts.append(f"{mixer.num_heads} heads over a latent of {mixer.kv_lora_rank} + {mixer.rope_head_dim}")
        else:
            assert isinstance(mixer, Convolution)
    return "; ".join(sorted(set(texts))) + (
        " and convolutions" if any(isinstance(mixer, Convolution) for mixer in mixers) else ""
    )


def _positions(spec: ModelSpec) -> str:
    positions = msgspec.to_builtins(spec.positions)
    kind = positions.pop("type")
    return kind + "".join(f", {key} {value}" for key, value in positions.items() if value not in (None, False))


def _tensor_table(its_rules: tuple[Rule, ...]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("checkpoint name", "shape", "count", "our name"):
        table.add_column(name)
    for rule in its_rules:
        table.add_row(rule.sources[0].name, " x ".join(map(str, rule.shape)), f"{rule.copies:,}", rule.ours)
    return table
