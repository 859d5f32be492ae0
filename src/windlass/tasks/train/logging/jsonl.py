"""Metrics as JSON lines: steps have a `step` and a `loss`, everything else an `event`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

from windlass.tasks.train.logging.fan_out import RANKS, StepMetrics


class JsonLines:
    """Appends, so that a resumed run continues the file. A full disk loses lines, but does not stop the run."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stream: IO[bytes] = path.open("ab", buffering=0)
        self.num_lost = 0
        if _is_torn(path):
            self._write(b"")

    def sample(self, sample: StepMetrics) -> None:
        self._write(msgspec.json.encode(sample))

    def event(self, kind: str, values: Mapping[str, Any]) -> None:
        if kind != RANKS:
            self._write(msgspec.json.encode({"event": kind, **values}))

    def close(self) -> None:
        self._stream.close()

    def _write(self, line: bytes) -> None:
        """One write per line, so that a killed run leaves whole lines; a partial one is ended by the next run."""
        try:
            self._stream.write(line + b"\n")
        except OSError:
            self.num_lost += 1


def _is_torn(path: Path) -> bool:
    with path.open("rb") as stream:
        if not stream.seekable() or stream.seek(0, 2) == 0:
            return False
        stream.seek(-1, 2)
        return stream.read(1) != b"\n"


class PrintedLines(JsonLines):
    """To standard output."""

    def __init__(self) -> None:
        self._stream = sys.stdout.buffer
        self.num_lost = 0

    def close(self) -> None:
        self._stream.flush()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a log; damaged ones are skipped."""
    if not path.is_file():
        return
    with path.open("rb") as stream:
        for line in stream:
            try:
                yield msgspec.json.decode(line, type=dict[str, Any])
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue


def read_samples(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Steps and events; of a step that was repeated after a resume or rollback, the last counts."""
    samples: dict[int, dict[str, Any]] = {}
    events: list[dict[str, Any]] = []
    for line in read_lines(path):
        if "event" in line:
            events.append(line)
            if line["event"] == "rollback":
                samples = {step: found for step, found in samples.items() if step <= line.get("to_step", step)}
        elif isinstance(line.get("step"), int):
            samples[line["step"]] = line
    return [samples[step] for step in sorted(samples)], events
