"""The model hub: the only file that downloads. Needs huggingface_hub (extra `run`); respects HF_HOME, HF_ENDPOINT and the user's token.

Files that have arrived stay, so a download that was interrupted goes on with the next; within a file, a broken connection is
taken up again where it broke. Knows no tensor.
"""

from __future__ import annotations

import fnmatch
import glob
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from windlass.core.model import Frozen
from windlass.errors import BadInput, MissingExtra
from windlass.formats.files import SAFETENSORS_INDEX
from windlass.formats.progress import Arrivals, reporting

SMALL_FILES = ("*.json", "tokenizer*", "*.model", "*.tiktoken", "*.jinja", "merges.txt", "vocab.txt", "LICENSE*", "README.md")
UNWANTED = ("consolidated*", "*.gguf", "adapter_*", "optimizer*", "scheduler*", "rng_state*", "training_args*")
"""Second copies, and what training leaves behind."""


class RemoteFile(Frozen):
    name: str
    num_bytes: int
    blob: str
    """What a cache calls it: the hash of its content."""


class RemoteModel(Frozen):
    """What the hub has at one commit, as far as it is wanted here."""

    name: str
    revision: str
    files: tuple[RemoteFile, ...]

    @property
    def shards(self) -> tuple[str, ...]:
        return tuple(file.name for file in self.files if file.name.endswith((".safetensors", ".bin")))

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def looks_like_hub_name(name: str) -> bool:
    owner, slash, repository = name.partition("/")
    return bool(slash and owner and repository and "/" not in repository and not name.startswith((".", "/", "~")))


def wanted(files: Collection[str]) -> list[str]:
    """Of a repository's files those that a model is: its weights once, config, tokenizer and template. Nothing in subdirectories."""
    top = [name for name in sorted(files) if "/" not in name and not _matches(name, UNWANTED)]
    weights = [name for name in top if name.endswith(".safetensors")] or [name for name in top if _matches(name, ("*model*.bin",))]
    others = [name for name in top if _matches(name, SMALL_FILES) and not name.endswith((".safetensors", ".bin"))]
    return sorted(weights + others)


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


# --- asking ----------------------------------------------------------------------------------------------------------


def fetch_config(name: str) -> Path:
    """Downloads config.json and, where there is one, the index; returns the directory that holds them."""
    hub = _package(f"looking up {name} on the hub")
    with _explained(name, "looked up"):
        config = Path(hub.hf_hub_download(name, "config.json"))
    # Small models have one file and no index; the config then decides.
    with suppress(hub.errors.HTTPError, OSError, ValueError):
        hub.hf_hub_download(name, SAFETENSORS_INDEX)
    return config.parent


def list_files(name: str, revision: str | None = None) -> RemoteModel:
    """Asks once; whoever downloads file by file names the commit it answered with, so that all files belong together."""
    hub = _package(f"looking up {name} on the hub")
    with _explained(name, "looked up"):
        found = hub.HfApi().model_info(name, revision=revision, files_metadata=True)
    siblings = {sibling.rfilename: sibling for sibling in found.siblings or []}
    files = tuple(_remote_file(siblings[file]) for file in wanted(siblings))
    return RemoteModel(name=name, revision=found.sha or "main", files=files)


def _remote_file(sibling: Any) -> RemoteFile:
    blob = sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id
    return RemoteFile(name=sibling.rfilename, num_bytes=sibling.size or 0, blob=blob or "")


# --- downloading -----------------------------------------------------------------------------------------------------


def pull(name: str, max_workers: int = 8, progress: Callable[[int, int], None] | None = None) -> Path:
    """The whole model into the hub's cache; returns its directory. `progress` is told (bytes on disk, bytes in all) now and then.

    What is in the cache is enough where the hub cannot be reached.
    """
    hub = _package(f"downloading {name}")
    try:
        model = list_files(name)
    except Unreachable:
        return _cached(hub, name)
    if not model.shards:
        raise BadInput(f"{name} on the hub has no safetensors and no PyTorch weights")
    blobs = Path(hub.constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "blobs"
    arrivals = Arrivals(blobs, {file.blob: file.num_bytes for file in model.files})
    patterns = [glob.escape(file.name) for file in model.files]
    with _explained(name, "downloaded"), _quiet(hub, progress is not None), reporting(arrivals, progress):
        found = hub.snapshot_download(name, revision=model.revision, allow_patterns=patterns, max_workers=max_workers)
        _remember_main(hub, name, model.revision)
    arrivals.remove_leftovers()
    return Path(found)
