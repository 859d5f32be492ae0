"""Which published files of a known model to run on this machine: the publisher's quantized ones where they fit, else the original."""

from __future__ import annotations

from windlass.core.hardware.spec import Hardware
from windlass.core.model import Frozen
from windlass.core.scheme import Scheme, scheme
from windlass.model.families import rules
from windlass.model.families.registry import KnownModel, PublishedFiles, spec_of
from windlass.units import format_bytes

CONTEXT = 8192
"""Tokens that must fit beside the weights."""
GGUF_GROUP = 32


class ChosenFiles(Frozen):
    hub: str
    file: str = ""
    """One .gguf file; empty: the whole repository."""
    why: str = ""
    """One line for the user."""
    scheme: Scheme | None = None
    """How the engine holds them; None: as the original is published, or it does not fit so."""


def choose_files(known: KnownModel, hardware: Hardware) -> ChosenFiles:
    """The first of the quantized files that fits, least lossy first; the original if there is none, or if none fits."""
    offered = [files for files in known.quantized if _is_held_packed(files, hardware)]
    for files in offered:
        free = free_bytes(known, files.scheme, bool(files.file), hardware)
        if free is not None:
            return _chosen(known, files, f"{format_bytes(free)} of memory stay free")
    if offered and free_bytes(known, "bf16", False, hardware) is None:
        return _chosen(known, offered[-1], "the smallest; the rest is read from disk", fits=False)
    return ChosenFiles(hub=known.hub, why=f"{known.name}: {known.hub}, as published")


def _chosen(known: KnownModel, files: PublishedFiles, why: str, fits: bool = True) -> ChosenFiles:
    """Beside a GPU only int4 is offloaded: what else does not fit is for the planner, which says what would."""
    held = _held_as(files.scheme, bool(files.file)) if fits or files.file else None
    return ChosenFiles(hub=files.hub, file=files.file, why=_said(known, files, why), scheme=held)


def _held_as(name: str, gguf: bool) -> Scheme:
    return scheme(name, GGUF_GROUP if gguf else None, zero_points=gguf and name == "int4")


def free_bytes(known: KnownModel, scheme_name: str, gguf: bool, hardware: Hardware) -> int | None:
    """Memory left on the fullest device; None: it does not fit without offloading."""
    from windlass.tasks.plan.inference.remedy import fits_devices
    from windlass.tasks.plan.inference.search.request import PlanRequest

    spec = spec_of(known)
    stored = _held_as(scheme_name, gguf)
    context = min(CONTEXT, spec.context_tokens)
    found = fits_devices(
        PlanRequest(spec=spec, rules=rules(spec), hardware=hardware, context_tokens=context, engine="windlass", stored=stored)
    )
    return None if found is None else found.fit.free_bytes


def _is_held_packed(files: PublishedFiles, hardware: Hardware) -> bool:
    """GGUF runs on GPUs too, but several times slower than other files; fp8 needs one."""
    on_cpus = all(device.kind == "cpu" for device in hardware.distinct_devices)
    return on_cpus if files.file else not on_cpus


def _said(known: KnownModel, files: PublishedFiles, why: str) -> str:
    where = f"{files.hub}/{files.file}" if files.file else files.hub
    return f"{known.name}: {where} ({files.scheme}), {why}; `{known.hub}` is the original"
