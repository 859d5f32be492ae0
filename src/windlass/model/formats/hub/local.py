"""Models on this disk: in the hub cache and in Windlass's models directory. Lists and deletes them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from windlass.core.model import Frozen
from windlass.errors import UnknownName

FORMATS = {".safetensors": "safetensors", ".bin": "pytorch", ".gguf": "gguf", ".m": "dllama"}
INCOMPLETE = "incomplete"


class LocalModel(Frozen):
    name: str
    path: Path
    """The directory to read it from."""
    num_bytes: int
    """Disk space that removing it frees."""
    last_used: float
    """Unix time, from file access times."""
    format: str
    """`safetensors`, `pytorch`, `gguf`, `dllama`; `incomplete` where an interrupted download or conversion left no weights."""


def models_directory() -> Path:
    """$XDG_DATA_HOME/windlass/models (specifications.freedesktop.org/basedir-spec)."""
    data = os.environ.get("XDG_DATA_HOME", "")
    return (Path(data) if Path(data).is_absolute() else Path.home() / ".local" / "share") / "windlass" / "models"


def local_models() -> list[LocalModel]:
    """From the hub cache and the models directory, last used first."""
    return sorted([*_cached(), *_converted()], key=lambda model: (-model.last_used, model.name))


def remove(name: str, dry_run: bool = False) -> int:
    """Deletes a model; returns the bytes freed. `dry_run` only counts."""
    models = local_models()
    found = [model for model in models if model.name == name]
    if not found:
        raise UnknownName("local model", name, {model.name for model in models})
    if not dry_run:
        for model in found:
            _remove(model)
    return sum(model.num_bytes for model in found)


def _remove(model: LocalModel) -> None:
    if model.path.is_relative_to(models_directory()):
        _remove_tree(model.path)
        return
    repository = next(folder for folder in (model.path, *model.path.parents) if folder.name.startswith("models--"))
    for repo in _repositories():
        if repo.repo_path == repository:
            _remove_revisions(repo)
    _remove_tree(repository)  # unfinished downloads


def _remove_revisions(repo: Any) -> None:
    """huggingface_hub knows which blobs are shared. Restricted to this repository, since copies of a model have the same commits."""
    from huggingface_hub import scan_cache_dir

    alone = replace(scan_cache_dir(), repos=frozenset({repo}))
    alone.delete_revisions(*(revision.commit_hash for revision in repo.revisions)).execute()


def _remove_tree(path: Path) -> None:
    if path.is_symlink():
        path.unlink()  # never delete the target of a link
    elif path.exists():
        shutil.rmtree(path)


# --- the hub's cache -------------------------------------------------------------------------------------------------


def _repositories() -> Iterable[Any]:
    """Complete repositories in the hub cache; none without huggingface_hub or the cache."""
    try:
        from huggingface_hub import scan_cache_dir
        from huggingface_hub.errors import CacheNotFound
    except ImportError:
        return []
    try:
        return [repo for repo in scan_cache_dir().repos if repo.repo_type == "model"]
    except (CacheNotFound, ValueError):
        return []


def _cached() -> Iterator[LocalModel]:
    known: set[Path] = set()
    for repo in _repositories():
        known.add(repo.repo_path)
        revision = max(repo.revisions, key=lambda revision: ("main" in revision.refs, revision.last_modified), default=None)
        if revision is not None:
            unfinished = sum(_size(file) for file in (repo.repo_path / "blobs").glob("*.incomplete"))
            yield LocalModel(
                name=repo.repo_id,
                path=revision.snapshot_path,
                num_bytes=repo.size_on_disk + unfinished,
                last_used=repo.last_accessed,
                format=_format(file.file_name for file in revision.files),
            )
    for folder in _cache_folders():
        if folder not in known:
            yield _described(folder.name.removeprefix("models--").replace("--", "/"), folder, INCOMPLETE)


def _cache_folders() -> list[Path]:
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return []
    return sorted(folder for folder in Path(HF_HUB_CACHE).glob("models--*") if folder.is_dir())


# --- the models directory -----------------------------------------------------------------------------------------------


def _converted() -> Iterator[LocalModel]:
    """Directories with weights or a config: `NAME` or `OWNER/NAME`."""
    top = models_directory()
    for folder in sorted([*top.glob("*"), *top.glob("*/*")]):
        names = [file.name for file in folder.iterdir() if file.is_file()] if folder.is_dir() else []
        if "config.json" in names or _format(names) != INCOMPLETE or any(name.endswith(".part") for name in names):
            yield _described(str(folder.relative_to(top)), folder, _format(names))


def _described(name: str, folder: Path, format: str) -> LocalModel:
    files = [Path(parent) / file for parent, _, names in os.walk(folder) for file in names]
    states = [file.lstat() for file in files]
    last_used = max((max(state.st_atime, state.st_mtime) for state in states), default=0.0)
    num_bytes = sum(state.st_size for state in states)
    return LocalModel(name=name, path=folder, num_bytes=num_bytes, last_used=last_used, format=format)


def _format(names: Iterable[str]) -> str:
    endings = {Path(name).suffix for name in names if not name.startswith(".")}
    return next((FORMATS[ending] for ending in FORMATS if ending in endings), INCOMPLETE)


def _size(file: Path) -> int:
    return file.lstat().st_size
