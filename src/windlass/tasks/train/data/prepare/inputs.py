"""Finds the source files and splits them into work units. Knows names and sizes; reads no document.

Units depend only on the files, not on the number of processes, so that the same sources always give the same shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Literal

from windlass.core.model import Frozen
from windlass.errors import BadInput
from windlass.units import MIB

Kind = Literal["text", "jsonl", "parquet"]
JSONL = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
PARQUET = (".parquet",)
TEXT = tuple(
    ".txt .md .rst .tex .py .pyi .c .h .cc .cpp .hpp .cu .java .js .ts .tsx .jsx .go .rs .rb .php .cs .kt .swift .scala .sh .sql .html "
    ".css .xml .json .yaml .yml .toml .ini .cfg .csv .tsv .lua .pl .r .jl .hs .ml .ex .erl .clj .vim .el .lisp .f90 .m".split()
)
"""For files in directories; a file named explicitly is read as text whatever its suffix."""
SMALLEST_UNIT, LARGEST_UNIT, UNITS = 4 * MIB, 256 * MIB, 512
SKIPPED_FOLDERS = ("__pycache__", "node_modules")


class FileSpan(Frozen):
    """A file or a part of it: bytes of JSONL, row groups of Parquet."""

    path: str
    kind: Kind
    start: int
    stop: int
    num_bytes: int


class WorkUnit(Frozen):
    number: int
    pieces: tuple[FileSpan, ...]


class SourceFiles(Frozen):
    units: tuple[WorkUnit, ...]
    num_files: int
    num_bytes: int
    skipped: tuple[tuple[str, int], ...]
    """Suffixes of skipped files, with counts."""
    digest: str
    """Digest of names, sizes and times, to detect changes."""


def find_inputs(sources: Sequence[str]) -> SourceFiles:
    files: list[tuple[Path, Kind]] = []
    skipped: dict[str, int] = {}
    for source in sources:
        found = list(_files_of(Path(source).expanduser(), skipped))
        if not found:
            raise BadInput(f"{source} has no text, .jsonl or .parquet files")
        files += found
    _refuse_repeated([path for path, _ in files])
    sizes = [path.stat().st_size for path, _ in files]
    total = sum(sizes)
    most = min(max(total // UNITS, SMALLEST_UNIT), LARGEST_UNIT)
    pieces = (piece for (path, kind), size in zip(files, sizes, strict=True) for piece in _pieces(path, kind, size, most))
    return SourceFiles(
        units=tuple(WorkUnit(number=number, pieces=tuple(group)) for number, group in enumerate(_grouped(pieces, most))),
        num_files=len(files),
        num_bytes=total,
        skipped=tuple(sorted(skipped.items(), key=lambda pair: -pair[1])),
        digest=_digest([path for path, _ in files]),
    )


def refuse_inside(sources: Sequence[str], out: Path) -> None:
    """The output must not be read as a source in the next run."""
    for source in sources:
        folder = Path(source).expanduser().resolve()
        if out.expanduser().resolve().is_relative_to(folder):
            raise BadInput(f"{out} is inside the source {source}; use an output directory outside it")


def _refuse_repeated(files: Sequence[Path]) -> None:
    seen: set[Path] = set()
    for path in files:
        if path in seen:
            raise BadInput(f"{path} occurs twice in the sources")
        seen.add(path)


def kind_of(path: Path) -> Kind | None:
    name = path.name.lower()
    if name.endswith(JSONL):
        return "jsonl"
    if name.endswith(PARQUET):
        return "parquet"
    return "text" if name.endswith(TEXT) else None


def _files_of(source: Path, skipped: dict[str, int]) -> Iterator[tuple[Path, Kind]]:
    if source.is_file():
        yield source, kind_of(source) or "text"
        return
    if not source.is_dir():
        raise BadInput(f"{source} {'is neither a file nor a directory' if source.exists() else 'does not exist'}")
    for path in sorted(source.rglob("*")):
        hidden = any(part.startswith(".") or part in SKIPPED_FOLDERS for part in path.relative_to(source).parts)
        if hidden or not path.is_file():
            continue
        kind = kind_of(path)
        if kind is None:
            skipped[path.suffix or path.name] = skipped.get(path.suffix or path.name, 0) + 1
        else:
            yield path, kind


def _pieces(path: Path, kind: Kind, size: int, most: int) -> Iterator[FileSpan]:
    if kind == "parquet":
        yield from _row_groups(path, most)
    elif kind == "jsonl" and path.suffix != ".gz":
        for start in range(0, size, most):
            stop = min(start + most, size)
            yield FileSpan(path=str(path), kind=kind, start=start, stop=stop, num_bytes=stop - start)
    else:
        yield FileSpan(path=str(path), kind=kind, start=0, stop=size, num_bytes=size)


def _row_groups(path: Path, most: int) -> Iterator[FileSpan]:
    from windlass.tasks.train.data.prepare.parquet import group_bytes

    start, held = 0, 0
    sizes = group_bytes(path)
    for number, size in enumerate(sizes):
        held += size
        if held >= most or number == len(sizes) - 1:
            yield FileSpan(path=str(path), kind="parquet", start=start, stop=number + 1, num_bytes=held)
            start, held = number + 1, 0


def _grouped(pieces: Iterator[FileSpan], most: int) -> Iterator[list[FileSpan]]:
    """Small files share a work unit."""
    group: list[FileSpan] = []
    for piece in pieces:
        if group and sum(held.num_bytes for held in group) + piece.num_bytes > most:
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def _digest(files: Sequence[Path]) -> str:
    digest = sha256()
    for path in files:
        state = path.stat()
        digest.update(f"{path.resolve()}\0{state.st_size}\0{state.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
