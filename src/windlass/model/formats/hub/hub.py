"""Downloads from the Hugging Face hub. Needs huggingface_hub (extra `hub`); respects HF_HOME, HF_ENDPOINT and HF_TOKEN.

Finished files are kept, so an interrupted download resumes with the next file; a broken connection resumes within the file.
"""

from __future__ import annotations

import fnmatch
import glob
from collections.abc import Callable, Collection, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any, Literal

from windlass.core.model import Frozen
from windlass.errors import BadInput, MissingExtra
from windlass.model.formats.disk.atomic import require_free
from windlass.model.formats.hub.progress import DownloadProgress, reporting
from windlass.model.formats.safetensors.files import SAFETENSORS_INDEX, safetensors_files, torch_files

SMALL_FILES = ("*.json", "tokenizer*", "*.model", "*.tiktoken", "*.jinja", "merges.txt", "vocab.txt", "LICENSE*", "README.md")
UNWANTED = ("consolidated*", "*.gguf", "adapter_*", "optimizer*", "scheduler*", "rng_state*", "training_args*")
"""Duplicates of the weights, and training artifacts."""


class RemoteFile(Frozen):
    name: str
    num_bytes: int
    blob: str
    """Name in the cache: the hash of its content."""


class RemoteModel(Frozen):
    """The files of a model at one commit that are needed here."""

    name: str
    revision: str
    files: tuple[RemoteFile, ...]

    @property
    def shards(self) -> tuple[str, ...]:
        return tuple(file.name for file in self.files if file.name.endswith((".safetensors", ".bin")))

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


class RemoteTensor(Frozen):
    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str


def looks_like_hub_name(name: str) -> bool:
    owner, slash, repository = name.partition("/")
    return bool(slash and owner and repository and "/" not in repository and not name.startswith((".", "/", "~")))


def select_files(files: Collection[str]) -> list[str]:
    """The files that make up a model: weights (once), config, tokenizer and template. No subdirectories."""
    top = [name for name in sorted(files) if "/" not in name and not _matches(name, UNWANTED)]
    weights = [name for name in top if name.endswith(".safetensors")] or [
        name for name in top if _matches(name, ("pytorch_model*.bin",))
    ]
    others = [name for name in top if _matches(name, SMALL_FILES) and not name.endswith((".safetensors", ".bin"))]
    return sorted(weights + others)


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


# --- looking up ----------------------------------------------------------------------------------------------------------


def fetch_config(name: str) -> Path:
    """Downloads config.json and, where there is one, the index; returns the directory that holds them."""
    hub = _package(f"looking up {name} on the hub")
    with _hub_errors(name, "looked up"):
        here = _cached_config(hub, name)
        if here is not None:
            return here
        config = Path(hub.hf_hub_download(name, "config.json"))
    # Small models have one file and no index; the config then decides.
    with suppress(hub.errors.HTTPError, OSError, ValueError):
        hub.hf_hub_download(name, SAFETENSORS_INDEX)
    return config.parent


def _cached_config(hub: Any, name: str) -> Path | None:
    """The config in the cache, where the hub cannot be asked. One question first, which fails at once: a download would be tried for half
    a minute by huggingface_hub before it says so."""
    try:
        hub.get_hf_file_metadata(hub.hf_hub_url(name, "config.json"))
    except (hub.errors.RepositoryNotFoundError, hub.errors.EntryNotFoundError):
        raise
    except (*_hub_exceptions(hub.errors), OSError, RuntimeError):
        found = hub.try_to_load_from_cache(name, "config.json")
        if not isinstance(found, str):
            raise
        return Path(found).parent
    return None


def list_files(name: str, revision: str | None = None) -> RemoteModel:
    """Lists the files at one commit; downloading by that revision keeps them consistent."""
    hub = _package(f"looking up {name} on the hub")
    with _hub_errors(name, "looked up"):
        found: Any = hub.HfApi().model_info(name, revision=revision, files_metadata=True)
    siblings: dict[str, Any] = {sibling.rfilename: sibling for sibling in found.siblings or ()}
    files = tuple(_remote_file(siblings[file]) for file in select_files(siblings))
    return RemoteModel(name=name, revision=found.sha or "main", files=files)


def _remote_file(sibling: Any) -> RemoteFile:
    blob = sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id
    return RemoteFile(name=sibling.rfilename, num_bytes=sibling.size or 0, blob=blob or "")


def remote_tensors(model: RemoteModel, max_workers: int = 8) -> tuple[RemoteTensor, ...]:
    """Names, dtypes and shapes from the headers of its safetensors files (about 100 kB each), before downloading them.

    Checked again once the files are here.
    """
    api = _package(f"looking up {model.name} on the hub").HfApi()

    def ask(file: str) -> list[RemoteTensor]:
        with _hub_errors(model.name, "looked up"):
            header = api.parse_safetensors_file_metadata(model.name, file, revision=model.revision)
        found = header.tensors.items()
        return [RemoteTensor(name=name, dtype=info.dtype, shape=tuple(info.shape), file=file) for name, info in found]

    files = [name for name in model.shards if name.endswith(".safetensors")]
    with ThreadPoolExecutor(max_workers) as pool:
        return tuple(tensor for tensors in pool.map(ask, files) for tensor in tensors)


# --- downloading -----------------------------------------------------------------------------------------------------


def pull(name: str, max_workers: int = 8, progress: Callable[[int, int], None] | None = None) -> Path:
    """Downloads the model into the hub cache; returns its directory. `progress` is called with (bytes done, total bytes)."""
    hub = _package(f"downloading {name}")
    try:
        model = list_files(name)
    except BadInput:
        cached = _cached(hub, name)  # fall back to the cache if the hub cannot be reached
        if cached is None:
            raise
        return cached
    if not model.shards:
        raise BadInput(f"{name} on the hub has neither safetensors nor PyTorch weights")
    blobs = Path(hub.constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "blobs"
    download = DownloadProgress(blobs, {file.blob: file.num_bytes for file in model.files})
    require_free(blobs, download.total_bytes - download.done_bytes())
    patterns = [glob.escape(file.name) for file in model.files]
    with _hub_errors(name, "downloaded"), _quiet(hub, progress is not None), reporting(download, progress):
        found = Path(hub.snapshot_download(name, allow_patterns=patterns, max_workers=max_workers))
    download.remove_leftovers()
    return found


def pull_file(name: str, file: str, progress: Callable[[int, int], None] | None = None) -> Path:
    """Downloads one file (a .gguf) into the hub cache, unless it is there; returns its path."""
    hub = _package(f"downloading {name}")
    found = hub.try_to_load_from_cache(name, file)
    if isinstance(found, str):
        return Path(found)
    with _hub_errors(name, "looked up"):
        remote: Any = hub.HfApi().model_info(name, files_metadata=True)
    sizes = {_remote_file(one).blob: one.size or 0 for one in remote.siblings or () if one.rfilename == file}
    if not sizes:
        raise BadInput(f"{name} on the hub has no file {file}")
    blobs = Path(hub.constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "blobs"
    download = DownloadProgress(blobs, sizes)
    require_free(blobs, download.total_bytes - download.done_bytes())
    with _hub_errors(name, "downloaded"), _quiet(hub, progress is not None), reporting(download, progress):
        made = Path(hub.hf_hub_download(name, file, revision=remote.sha))
    download.remove_leftovers()
    return made


def fetch_small_files(model: RemoteModel, directory: Path) -> None:
    """Config, tokenizer, template and index, for a model whose weights are streamed."""
    for file in model.files:
        if file.name not in model.shards:
            _download(model, file.name, directory)


def stream_shards(model: RemoteModel, directory: Path, skip: Collection[str] = ()) -> Iterator[tuple[Path, bool]]:
    """Downloads weight files one after another, prefetching the next; yields (path, is last).

    They are plain files in `directory`, not in the cache, so the caller may delete each when done: at most two exist at a time.
    """
    names = [name for name in model.shards if name not in skip]
    arriving = _begin(model, names[0], directory) if names else None
    for following in [*names[1:], None]:
        if arriving is None:
            return
        path = arriving.result()
        arriving = _begin(model, following, directory) if following is not None else None
        yield path, following is None


def _begin(model: RemoteModel, file: str, directory: Path) -> Future[Path]:
    """In a daemon thread, so that aborting does not wait for a download."""
    future: Future[Path] = Future()

    def work() -> None:
        try:
            future.set_result(_download(model, file, directory))
        except Exception as error:  # noqa: BLE001 - the outermost edge of a thread; raised again by result()
            future.set_exception(error)

    Thread(target=work, name=f"download {file}", daemon=True).start()
    return future


def _download(model: RemoteModel, file: str, directory: Path) -> Path:
    hub = _package(f"downloading {model.name}")
    with _hub_errors(model.name, "downloaded"):
        return Path(hub.hf_hub_download(model.name, file, revision=model.revision, local_dir=directory))


def _cached(hub: Any, name: str) -> Path | None:
    """The model from the cache, if it looks complete."""
    patterns = ["*.safetensors", *SMALL_FILES]
    try:
        found = hub.snapshot_download(
            name, local_files_only=True, allow_patterns=patterns, ignore_patterns=[*UNWANTED, "*/*", "*.bin"]
        )
    except (hub.errors.LocalEntryNotFoundError, ValueError):
        return None
    has_weights = safetensors_files(Path(found)) or torch_files(Path(found))
    return Path(found) if has_weights else None


# --- the package and its errors --------------------------------------------------------------------------------------


def _package(purpose: str) -> Any:
    try:
        hub = import_module("huggingface_hub")
        for part in ("constants", "errors", "utils"):
            import_module(f"huggingface_hub.{part}")
    except ImportError:
        raise MissingExtra("huggingface_hub", "hub", purpose) from None
    return hub


@contextmanager
def _quiet(hub: Any, quiet: bool) -> Generator[None]:
    """Disables huggingface_hub's progress bars where the caller shows its own."""
    if not quiet or hub.utils.are_progress_bars_disabled():
        yield
        return
    hub.utils.disable_progress_bars()
    try:
        yield
    finally:
        hub.utils.enable_progress_bars()


@contextmanager
def _hub_errors(name: str, task: Literal["looked up", "downloaded"]) -> Generator[None]:
    """Turns hub and network errors into a BadInput that says what to do."""
    hub = _package(f"looking up {name} on the hub")
    try:
        yield
    except (*_hub_exceptions(hub.errors), OSError, ValueError, RuntimeError) as error:
        raise BadInput(_explanation(hub, name, task, error)) from None


def _is_unreachable(error: Exception) -> bool:
    """No answer at all: an answer has a status."""
    return (getattr(error, "response", None) is None and isinstance(error, OSError)) or "Connect" in type(error).__name__


def _hub_exceptions(errors: Any) -> list[type[Exception]]:
    """Exception classes of huggingface_hub; XetDownloadError is missing in older versions."""
    found = [errors.HTTPError, errors.EntryNotFoundError, errors.SafetensorsParsingError]
    return [*found, getattr(errors, "XetDownloadError", OSError)]


WITHOUT_HUB = "check the network, or copy the model here and name its directory or .gguf file"


def _explanation(hub: Any, name: str, task: str, error: Exception) -> str:
    errors, looking = hub.errors, task == "looked up"
    first_line = (str(error).splitlines() or [type(error).__name__])[0]
    match error:
        case errors.GatedRepoError():
            page = "" if looking else f", {hub.constants.ENDPOINT}/{name}"
            return f"{name} is gated: request access on its hub page{page}, then set HF_TOKEN or run `hf auth login`"
        case errors.RepositoryNotFoundError():
            return f"model {name} not found on the hub (if it is private, set HF_TOKEN)"
        case errors.LocalEntryNotFoundError() | errors.OfflineModeIsEnabled() if looking:
            return f"{name} is not on this disk, and the hub cannot be reached; {WITHOUT_HUB}"
        case errors.EntryNotFoundError() if looking and not isinstance(error, errors.LocalEntryNotFoundError):
            return f"{name} on the hub has no config.json"
        case OSError() | errors.HTTPError() if looking and _is_unreachable(error):
            return f"{name} is not on this disk, and the hub cannot be reached ({first_line}); {WITHOUT_HUB}"
        case _ if looking:
            return f"{name} could not be looked up on the hub: {first_line}"
        case _:
            return f"{name} could not be downloaded from {hub.constants.ENDPOINT}: {first_line}; finished files are kept; run it again to resume"
