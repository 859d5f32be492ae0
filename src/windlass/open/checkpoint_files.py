"""Reads a model's files for `windlass check`: what is there, whether it is whole, and its digests. Loads no tensor."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from windlass.errors import Error
from windlass.tasks.check.model.files import FileFacts

REPORT = "windlass-report.json"
"""Of `windlass convert`."""
SUMS = ("SHA256SUMS", "sha256sums.txt", "checksums.sha256")
_HEX = re.compile(r"[0-9a-f]{64}")


def read_files(path: Path, digests: bool, seen: Callable[[str], None] = lambda _: None) -> FileFacts:
    """`digests`: also read every byte. `seen`: called with each file's name before it is read."""
    if path.is_file():
        return FileFacts(path=str(path), num_files=1, num_bytes=path.stat().st_size)
    from windlass.model.formats.checkpoint import tensor_names
    from windlass.model.formats.safetensors.files import SAFETENSORS_INDEX, missing_files, read_index, safetensors_files
    from windlass.model.formats.safetensors.header import read_header

    problems: list[str] = []
    names = safetensors_files(path)
    try:
        listed = set(read_index(path / SAFETENSORS_INDEX).values()) if (path / SAFETENSORS_INDEX).is_file() else set[str]()
        problems += [f"{name} is missing" for name in missing_files(path, listed)]
    except Error as error:
        problems.append(str(error))
    for name in names:
        try:
            read_header(path / name)
        except Error as error:
            problems.append(str(error))
    num_digests = None
    if digests:
        wrong, num_digests = _wrong_digests(path, names, seen)
        problems += wrong
    return FileFacts(
        path=str(path),
        num_files=len(names),
        num_bytes=sum((path / name).stat().st_size for name in names),
        num_tensors=0 if problems else len(tensor_names(path)),
        problems=tuple(problems),
        num_digests=num_digests,
    )


def known_digests(path: Path, names: list[str]) -> dict[str, str]:
    """From a conversion's report, a SHA256SUMS file, or the hub's cache, whose blobs are named by their digest."""
    found: dict[str, str] = {}
    for name in names:
        blob = (path / name).resolve().name
        if _HEX.fullmatch(blob):
            found[name] = blob
    for sums in SUMS:
        if (path / sums).is_file():
            lines = (line.split() for line in (path / sums).read_text(errors="replace").splitlines())
            found |= {
                words[1].lstrip("*"): words[0].lower() for words in lines if len(words) == 2 and _HEX.fullmatch(words[0].lower())
            }
    if (path / REPORT).is_file():
        report = msgspec.json.decode((path / REPORT).read_bytes(), type=_Report)
        found |= {one.file: one.sha256 for one in report.files}
    return {name: digest for name, digest in found.items() if name in names}


class _File(msgspec.Struct):
    file: str
    sha256: str


class _Report(msgspec.Struct):
    files: tuple[_File, ...] = ()


def _wrong_digests(path: Path, names: list[str], seen: Callable[[str], None]) -> tuple[list[str], int]:
    from windlass.model.formats.safetensors.writer import file_digest

    known, wrong = known_digests(path, names), list[str]()
    for name, expected in known.items():
        seen(name)
        if file_digest(path / name) != expected:
            wrong.append(f"{name} is damaged: its SHA-256 is not the one that was published")
    return wrong, len(known)
