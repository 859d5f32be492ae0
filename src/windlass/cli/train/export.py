"""Runs `windlass train export` and `windlass train consolidate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from windlass.cli.console import console
from windlass.errors import BadInput
from windlass.foreign import MAX_MESSAGE, shown
from windlass.open.progress import byte_progress
from windlass.units import format_bytes, parse_bytes


def run_export(checkpoint: Path, out: Path, *, tokenizer: Path | None, dtype: str, max_shard: str, as_json: bool) -> int:
    from windlass.model.families import describe, rules
    from windlass.tasks.train.checkpoint.manifest import check_files, read_manifest
    from windlass.tasks.train.checkpoint.tensors import CheckpointTensors
    from windlass.tasks.train.export.export import export_model

    folder = _step_folder(checkpoint)
    manifest = read_manifest(folder)
    check_files(folder, manifest, manifest.files)
    identity = manifest.identity
    spec = describe(identity.config, identity.model, where=f"{folder}: config")
    tensors = CheckpointTensors(folder)
    if identity.recipe.get("lora", {}).get("rank") is not None:
        return _export_adapter(manifest, tensors, rules(spec), out, as_json)
    text = _tokenizer(folder, tokenizer)
    with byte_progress(f"exporting {identity.model}, step {manifest.step:,}", not as_json) as started:
        advance = started(_num_bytes(tensors, dtype))
        done = export_model(
            tensors,
            rules(spec),
            identity.config,
            out,
            dtype=dtype,
            tokenizer=text,
            max_shard_bytes=parse_bytes(max_shard),
            progress=advance,
        )
    if as_json:
        sys.stdout.write(
            msgspec.json.encode({"out": str(out), "step": manifest.step, **msgspec.to_builtins(done)}).decode() + "\n"
        )
        return 0
    console().print(
        f"{identity.model} after step {manifest.step:,}: {done.num_tensors:,} tensors, {format_bytes(done.num_bytes)} in {dtype} to {out}"
    )
    if text is None:
        console().print("no tokenizer was found, so none was exported; set --tokenizer")
    return 0


def _export_adapter(manifest: Any, tensors: Any, rules: Any, out: Path, as_json: bool) -> int:
    """Exports the adapters of a LoRA run in PEFT format."""
    from windlass.core.recipe.sections import LoraSection
    from windlass.tasks.train.export.adapters import save_adapter

    if out.exists() and any(out.iterdir()):
        raise BadInput(f"{out} already exists; choose a new directory")
    recipe: dict[str, Any] = manifest.identity.recipe
    base: str = recipe["model"].get("path") or recipe["model"].get("name") or manifest.identity.model
    found = {name: tensors.tensor(name) for name in tensors.names()}
    written = save_adapter(found, rules, msgspec.convert(recipe["lora"], LoraSection), base, out)
    if as_json:
        result = {"out": str(out), "step": manifest.step, "adapter_of": base, "num_tensors": len(written)}
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    else:
        console().print(f"adapters of {base} after step {manifest.step:,}: {len(written):,} tensors to {out}, for PEFT")
    return 0


def _step_folder(checkpoint: Path) -> Path:
    """The given step, or the last complete one of a run's folder."""
    from windlass.tasks.train.checkpoint.folder import named_steps, step_name, step_of
    from windlass.tasks.train.checkpoint.manifest import check_sizes, read_manifest

    if not checkpoint.is_dir():
        raise BadInput(f"{checkpoint} is not a directory; give a run's directory, or one of its step-N directories")
    if step_of(checkpoint.resolve().name) is not None:
        check_sizes(checkpoint, read_manifest(checkpoint))
        return checkpoint
    for base in (checkpoint / "checkpoints", checkpoint):
        for step in reversed(named_steps(base)):
            try:
                check_sizes(base / step_name(step), read_manifest(base / step_name(step)))
            except BadInput as error:
                print(f"windlass: skipping the checkpoint of step {step}: {shown(error, MAX_MESSAGE)}", file=sys.stderr)
                continue
            return base / step_name(step)
    raise BadInput(f"{checkpoint} has no checkpoint")


def _tokenizer(folder: Path, given: Path | None) -> Path | None:
    """As given, or the run's copy beside its checkpoints."""
    if given is not None:
        if not (given / "tokenizer.json").is_file():
            raise BadInput(f"--tokenizer {given} has no tokenizer.json")
        return given
    kept = (base / "tokenizer" for base in (folder.parent, folder.parent.parent))
    return next((path for path in kept if (path / "tokenizer.json").is_file()), None)


def _num_bytes(tensors: Any, dtype: str) -> int:
    """For the progress bar."""
    return sum(tensors.num_elements(name) for name in tensors.names()) * (4 if dtype == "fp32" else 2)


def run_consolidate(local: Path, shared: Path, *, hostfile: Path, as_json: bool) -> int:
    from windlass.tasks.train.checkpoint.consolidate import consolidate, read_hostfile

    hosts = read_hostfile(hostfile)
    done = consolidate(local, shared, hosts, notify=lambda text: print(f"windlass: {text}", file=sys.stderr))
    if as_json:
        sys.stdout.write(msgspec.json.encode(done).decode() + "\n")
        return 0
    for one in done:
        console().print(
            f"step {one.step:,}: {one.num_files} files, {format_bytes(one.num_bytes)} from {one.num_hosts} hosts to {shared}"
        )
    if not done:
        console().print(f"nothing to collect: no host has a checkpoint in {local}")
    return 0
