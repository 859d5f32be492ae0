"""What a name means: an existing path first, then the bundled model, the registry, the hub. Also hardware: given, or this machine."""

from __future__ import annotations

from pathlib import Path

import msgspec

from windlass.core.hardware.spec import Hardware
from windlass.core.model import Frozen, ModelSpec
from windlass.core.rule import Rule
from windlass.errors import BadInput
from windlass.families import describe, hints_from, rules
from windlass.families.registry import find, spec_of, unknown_model


class Resolved(Frozen):
    spec: ModelSpec
    rules: tuple[Rule, ...]
    source: str
    digest: str = ""


def resolve_model(name: str) -> Resolved:
    path = Path(name).expanduser()
    if path.exists():
        return from_path(path)
    from windlass.bundled.models import find_bundled

    inside = find_bundled(name)
    if inside is not None:
        return from_path(inside)
    known = find(name)
    if known is not None:
        spec = spec_of(known)
        return Resolved(spec=spec, rules=rules(spec), source=known.hub)
    from windlass.formats.hub.hub import fetch_config, looks_like_hub_name

    if not looks_like_hub_name(name):
        raise unknown_model(name)
    found = from_path(fetch_config(name), name.split("/")[-1])
    return msgspec.structs.replace(found, source=name)


def from_path(path: Path, name: str = "") -> Resolved:
    """A directory with config.json, or the file itself. Tensor names, where there are any, decide what the config leaves open."""
    from windlass.formats.checkpoint import digest, tensor_names
    from windlass.formats.config import read_config

    config = read_config(path)
    if {"layout", "scheme", "ranks"} <= config.keys():
        raise BadInput(f"{path} is a saved plan, not a model; a run starts from it with --plan")
    where = str(path / "config.json" if path.is_dir() else path)
    label = name or (path.resolve().name if path.is_dir() else path.stem)
    spec = describe(config, label, where=where)
    names = tensor_names(path)
    if names:
        spec = describe(config, label, hints=hints_from(names, spec.num_layers), where=where)
    return Resolved(spec=spec, rules=rules(spec), source=str(path), digest=digest(path))


def resolve_hardware(text: str | None) -> Hardware:
    if text is not None:
        from windlass.core.hardware.parse import parse_hardware

        return parse_hardware(text)
    from windlass.machine.probe import probe

    return probe()
