"""What a reader of foreign input is, to the fuzzer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fuzz.mutate import Mutator, Sample, mutate_parts
from windlass.errors import Error


@dataclass(frozen=True)
class Reader:
    samples: Callable[[Path], Sequence[Sample]]
    """Sound inputs, made anew; may use the folder."""
    read: Callable[[bytes, Path], object]
    """Reads one input as the program does. The folder is that of `samples`, a copy for each process."""
    mutate: Mutator = mutate_parts
    refusals: tuple[type[BaseException], ...] = (Error,)
    """What it may raise: everything else is a finding."""
    may_exhaust: bool = False
    """It runs in a process with limits (model/text/isolated): time, memory and an end of that process are the limits at work."""
    seconds: float = 10.0
    """CPU time of one input of some kilobytes, whose reading takes milliseconds. More is a hang."""
    is_heavy: bool = False
    """Needs torch."""
    is_warmed: bool = True
    """A sound input is read before the first fork, so that what it imports is there; not where reading starts threads."""


def put(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path
