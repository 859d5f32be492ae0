"""`windlass completion SHELL`: the script that makes a shell complete commands, options and model names."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from windlass.errors import UnknownName

SHELLS = ("bash", "zsh", "fish")


def script(shell: str) -> str:
    if shell not in SHELLS:
        raise UnknownName("shell", shell, SHELLS)
    typer_completion: Any = import_module("typer.completion")
    return typer_completion.get_completion_script(prog_name="windlass", complete_var="_WINDLASS_COMPLETE", shell=shell)


def complete_model(incomplete: str) -> list[str]:
    """Models that the typed text may be the beginning of: bundled, of the registry, on this disk."""
    from windlass.model.bundled.models import bundled_names
    from windlass.model.families.registry import known_models

    names = {*bundled_names(), *(name for model in known_models() for name in (model.name, *model.aliases)), *_converted()}
    return sorted(name for name in names if name.lower().startswith(incomplete.lower()))


def _converted() -> list[str]:
    from windlass.model.formats.hub.local import models_directory

    return [folder.name for folder in models_directory().glob("*") if folder.is_dir()]
