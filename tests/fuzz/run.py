"""Runs mutated inputs through the readers, each batch in a forked process with limits, so that nothing that happens ends the run.

    python tests/fuzz/run.py --inputs 100000                  spread over all readers
    python tests/fuzz/run.py --reader gguf-rows --seconds 60
    python tests/fuzz/run.py --reader gguf-rows --seed 7 --number 4711 --show     one input again

An input follows from its reader, the seed and its number alone. A finding is an exception that is no refusal, a signal, too much time or
too much memory; the same finding is counted once with its first input.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import mmap
import os
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import NoReturn

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from fuzz.mutate import Sample
from fuzz.reader import Reader
from fuzz.readers import READERS

BATCH = 500
WALL_SECONDS = 300.0
"""The machine may be busy with other things; but a reader that waits for something waits longer."""
EXHAUSTED_SECONDS = 1.0
"""Of one that runs under limits anyway (model/text/isolated/pool.py)."""
MEMORY_BYTES = 512 * 2**20
"""Above what the process has when it begins."""
_STATE = struct.Struct("<q")


@dataclass
class Finding:
    reader: str
    seed: int
    number: int
    what: str
    count: int = 1

    def __str__(self) -> str:
        return f"{self.reader} --seed {self.seed} --number {self.number} ({self.count} times): {self.what}"


@dataclass
class Result:
    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    ended: int = 0
    """By the limits that the reader runs under."""
    seconds: float = 0.0
    findings: dict[str, Finding] = field(default_factory=dict[str, Finding])

    def add(self, found: Finding) -> None:
        known = self.findings.setdefault(found.what.splitlines()[0], found)
        if known is not found:
            known.count += 1


def input_of(reader: Reader, name: str, samples: Sequence[Sample], seed: int, number: int) -> bytes:
    """Number 0 and those after it are the samples themselves: they must be read."""
    if number < len(samples):
        return b"".join(samples[number])
    return reader.mutate(Random(f"{name} {seed} {number}"), samples)


class Campaign:
    """One reader and a seed. Batches go on where the last one ended. `given`: inputs instead of made ones, which need not be sound."""

    def __init__(self, name: str, seed: int, folder: Path, given: Sequence[bytes] = ()) -> None:
        self.name, self.seed, self.reader, self.given = name, seed, READERS[name], given
        self.folder = folder / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.samples = list(self.reader.samples(self.folder))
        self.next, self.result = 0, Result()
        if self.reader.is_warmed:
            with suppress(*self.reader.refusals):
                self.reader.read(b"".join(self.samples[0]), self.folder)

    def run(self, count: int) -> None:
        began, stop = time.monotonic(), self.next + count
        while self.next < stop:
            self._batch(min(stop, self.next + BATCH))
        self.result.seconds += time.monotonic() - began

    def _batch(self, stop: int) -> None:
        state = mmap.mmap(-1, _STATE.size)
        _STATE.pack_into(state, 0, self.next)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            self._in_child(stop, state, writing)
        os.close(writing)
        with os.fdopen(reading, "rb") as stream:
            lines = stream.read().splitlines()
        _, status = os.waitpid(child, 0)
        (at,) = _STATE.unpack_from(state)
        self._note(lines)
        if os.WIFSIGNALED(status) or os.WEXITSTATUS(status):
            self._ended(at, status)
            at += 1
        self.result.inputs += at - self.next
        self.next = at

    def _note(self, lines: list[bytes]) -> None:
        for line in lines:
            with suppress(ValueError):  # half a line of a process that was ended
                kind, number, what = json.loads(line)
                if kind == "counts":
                    self.result.accepted += number
                    self.result.refused += what
                elif kind == "exhausted":
                    self.result.ended += 1
                else:
                    self.result.add(Finding(self.name, self.seed, number, what))

    def _ended(self, number: int, status: int) -> None:
        if self.reader.may_exhaust:
            self.result.ended += 1
            return
        ended_by = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"
        meaning = {"SIGPROF": f"more than {self.reader.seconds:g} s of CPU time", "SIGALRM": "it waits"}
        self.result.add(Finding(self.name, self.seed, number, f"{ended_by}: {meaning.get(ended_by, 'the process ended')}"))

    # --- in the child

    def _in_child(self, stop: int, state: mmap.mmap, writing: int) -> NoReturn:
        os.chdir(self.folder)
        limit_process(quiet=True)
        accepted = refused = 0
        for number in range(self.next, stop):
            _STATE.pack_into(state, 0, number)
            signal.setitimer(signal.ITIMER_PROF, EXHAUSTED_SECONDS if self.reader.may_exhaust else self.reader.seconds)
            signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
            what = self.one(number)
            if what is None:
                accepted += 1
            elif what == "":
                refused += 1
            else:
                _say(writing, "exhausted" if what == "exhausted" else "finding", number, what)
        _STATE.pack_into(state, 0, stop)
        _say(writing, "counts", accepted, refused)
        os._exit(0)

    def one(self, number: int) -> str | None:
        """None: read; empty: refused; else what went wrong."""
        is_sound = not self.given and number < len(self.samples)
        data = self.given[number] if self.given else input_of(self.reader, self.name, self.samples, self.seed, number)
        try:
            self.reader.read(data, self.folder)
        except self.reader.refusals as refusal:
            return f"a sound input is refused: {refusal}" if is_sound else ""
        except MemoryError as error:
            return "exhausted" if self.reader.may_exhaust else described(error)
        except BaseException as error:  # noqa: BLE001 - exactly these are looked for
            return described(error)
        return None


def described(error: BaseException) -> str:
    """The exception and the innermost place in our code; below it what it says and the calls."""
    calls = traceback.extract_tb(error.__traceback__)
    ours = [call for call in calls if "windlass" in call.filename] or calls
    place = f"{Path(ours[-1].filename).name}:{ours[-1].name}" if ours else "?"
    return f"{type(error).__name__} in {place}\n{str(error)[:300]}\n" + "".join(traceback.format_list(calls[-6:]))


def limit_process(quiet: bool) -> None:
    faulthandler.disable()
    for name in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(name, signal.SIG_DFL)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    if "libasan" not in os.environ.get("LD_PRELOAD", ""):  # its shadow is terabytes of addresses
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if quiet:  # Rust prints its panics, the kernel nothing
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)


def _say(writing: int, kind: str, number: int, what: object) -> None:
    line = json.dumps([kind, number, what]).encode() + b"\n"
    while line:
        line = line[os.write(writing, line) :]


# --- several readers


@contextmanager
def scratch() -> Iterator[Path]:
    """In memory where that is possible: every input is written to a file."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="windlass-fuzz-", dir=shared if os.access(shared, os.W_OK) else None) as folder:
        yield Path(folder)


def run(
    names: Sequence[str], seed: int, inputs: int | None, seconds: float | None, report: Path | None = None
) -> dict[str, Result]:
    """All readers in turn, a batch each, until every one has had its share of the inputs or the time is over."""
    _one_thread()
    with scratch() as folder:
        campaigns = [Campaign(name, seed, folder) for name in names]
        until = None if seconds is None else time.monotonic() + seconds
        share = None if inputs is None else -(-inputs // len(names))
        while campaigns_left := [one for one in campaigns if share is None or one.result.inputs < share]:
            for one in campaigns_left:
                one.run(BATCH if share is None else min(BATCH, share - one.result.inputs))
                if until is not None and time.monotonic() > until:
                    return {one.name: one.result for one in campaigns}
            if report is not None:
                report.write_text(table({one.name: one.result for one in campaigns}))
        return {one.name: one.result for one in campaigns}


def _one_thread() -> None:
    """Forked processes have no threads of their own; a pool would wait for those of the parent."""
    if any(READERS[name].is_heavy for name in READERS):
        with suppress(ImportError):
            import torch

            torch.set_num_threads(1)


def table(results: dict[str, Result]) -> str:
    lines = [f"{'reader':24} {'inputs':>9} {'read':>8} {'refused':>8} {'ended':>6} {'a second':>8} {'findings':>8}"]
    for name, one in results.items():
        speed = one.inputs / one.seconds if one.seconds else 0.0
        lines.append(
            f"{name:24} {one.inputs:9,} {one.accepted:8,} {one.refused:8,} {one.ended:6,} {speed:8,.0f} {len(one.findings):8}"
        )
    lines.append(f"{'all':24} {sum(one.inputs for one in results.values()):9,}")
    return "\n".join([*lines, *(str(found) for one in results.values() for found in one.findings.values())]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reader", action="append", choices=sorted(READERS), help="several times for several; default: all")
    parser.add_argument("--inputs", type=int, help="of all readers together")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, help="only this input, in this process")
    parser.add_argument("--show", action="store_true", help="print the input instead of reading it")
    parser.add_argument("--report", type=Path, help="a file that is written again and again while it runs")
    given = parser.parse_args()
    names = given.reader or list(READERS)
    if given.number is not None:
        return _again(names[0], given.seed, given.number, given.show)
    results = run(names, given.seed, given.inputs or (None if given.seconds else 100_000), given.seconds, given.report)
    print(table(results))
    return int(any(one.findings for one in results.values()))


def _again(name: str, seed: int, number: int, is_shown: bool) -> int:
    with scratch() as folder:
        one = Campaign(name, seed, folder)
        if is_shown:
            sys.stdout.buffer.write(input_of(one.reader, name, one.samples, seed, number))
            return 0
        os.chdir(one.folder)
        found = one.one(number)
        print({None: "read", "": "refused"}.get(found, found))
        return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
