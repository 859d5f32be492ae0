"""Finds a model's weight files: a directory of safetensors, or one .gguf or .m file. No torch."""

from __future__ import annotations

import re
from glob import escape
from pathlib import Path

from windlass.errors import BadInput
from windlass.model.formats.safetensors.files import safetensors_files, torch_files

_SHARD = re.compile(r"(.*)-\d{5}-of-\d{5}\.gguf")
_LATER_SHARD = re.compile(r".*-(?!00001)\d{5}-of-\d{5}\.gguf")

GENERATION_CONFIG = "generation_config.json"


def own_generation_config(file: Path) -> Path:
    """Beside a .m file, whose format has no place for sampling defaults; others may lie in the same folder."""
    return file.with_suffix(f".{GENERATION_CONFIG}")


def model_file(path: Path) -> Path:
    """A model directory, .gguf file or .m file; of a directory that only contains one .gguf or .m file, that file."""
    if path.is_dir():
        return _within(path)
    if path.is_file() and path.suffix in (".gguf", ".m"):
        return path
    if not path.exists():
        raise BadInput(
            f"{path} does not exist; give a model directory, a .gguf file, a .m file, or a name from `windlass models`"
        )
    raise BadInput(f"{path} is neither a model directory, a .gguf file nor a .m file")


def weight_files(path: Path) -> list[Path]:
    """Every weight file of a model directory or of a (possibly split) model file."""
    if path.is_dir():
        files = sorted(path.iterdir())
    else:
        files = sorted(path.parent.glob(f"{escape(found[1])}-*-of-*.gguf")) if (found := _SHARD.fullmatch(path.name)) else [path]
    return [file for file in files if file.suffix in (".safetensors", ".bin", ".gguf", ".m")]


def _within(directory: Path) -> Path:
    if safetensors_files(directory) or torch_files(directory):
        return directory
    found = sorted(file for file in directory.iterdir() if file.suffix in (".gguf", ".m") and file.is_file())
    found = [file for file in found if not _LATER_SHARD.fullmatch(file.name)]
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:4])
        raise BadInput(
            f"{directory} holds {len(found)} models ({names}{', ...' if len(found) > 4 else ''}); name one of the files"
        )
    return found[0] if found else directory
