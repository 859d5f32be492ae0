"""The conversion itself: slices read, packed and written by several workers at once, with a journal that survives a kill.

A slice is journalled after its bytes are on disk; a slice that is not journalled is done again, to the same bytes at the same
place. Nothing in the output directory looks finished until all of it is: shards have hidden names until they are whole, and
config.json comes last.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from windlass.convert.calibration import Calibration
from windlass.convert.outputs import Output
from windlass.convert.pack import Packed, RawBlocks, pack_unit
from windlass.convert.units import LARGEST_BYTES, Unit
from windlass.formats.disk.atomic import part_name
from windlass.formats.disk.journal import Journal
from windlass.formats.safetensors.shards import OutTensor, Shard
from windlass.formats.safetensors.writer import ShardWriter, file_digest
from windlass.kernels.packing.statistics import Statistics
from windlass.units import MIB
from windlass.weights.tensors.readers import ReadRows

SYNC_BYTES = 256 * MIB
"""Written between two waits for the disk: what a power cut may cost, and far more than a wait takes."""
QUEUED_PER_WORKER = 2
M_MMAP_THRESHOLD = -3
"""Of mallopt(3)."""

Progress = Callable[[int], None]
"""Called with the source's bytes of every slice that is done, in 16 bits a weight."""


@dataclass
class Job:
    """All that the workers need, and how far they are."""

    outputs: tuple[Output, ...]
    units: tuple[Unit, ...]
    shards: tuple[Shard, ...]
    read: Callable[[Output], ReadRows]
    raw: Callable[[Output], RawBlocks | None]
    directory: Path
    journal: Journal
    workers: int
    progress: Progress = lambda _: None
    starting: Callable[[list[Unit]], None] = lambda _: None
    """Told, before anything is read, of the slices that are to be done."""
    flush_after: frozenset[str] = frozenset()
    """Slices after which to wait for the disk at once: the last ones of a source file that is waiting to be deleted."""
    settled: Callable[[list[Unit]], None] = lambda _: None
    """Told of slices whose bytes are safe."""
    calibration: Calibration | None = None
    """What is known of the inputs of every matrix; None: weights are rounded for themselves."""
    given_up: Callable[[], None] = lambda: None
    """Told that nothing more will be read; workers that wait for the source must not wait any longer."""
    digests: dict[str, str] = field(default_factory=dict[str, str])


def _keep_heaps_small() -> None:
    """glibc comes to keep freed buffers of up to 32 MB, where they hold several times what is in use; slices are worth keeping, no more."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_BYTES + MIB)


def out_tensors(outputs: tuple[Output, ...]) -> list[OutTensor]:
    return [OutTensor(name=piece.name, dtype=piece.dtype, shape=piece.shape) for output in outputs for piece in output.pieces]


def run(job: Job) -> dict[int, Statistics]:
    """Writes every shard; returns what each output lost. Raises what a worker raised, the journal being up to date."""
    threads = torch.get_num_threads()
    _keep_heaps_small()
    torch.set_num_threads(1)  # slices are the parallelism; threads within a slice would fight over the same cores
    try:
        shards = _Shards(job)
        with ThreadPoolExecutor(job.workers, thread_name_prefix="convert") as pool:
            _Loop(job, shards, pool).run()
    finally:
        torch.set_num_threads(threads)
    return _statistics(job)


class _Shards:
    """The new files: which slices each still waits for, and its digest once it is whole."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.file_of = {tensor.name: shard.file for shard in job.shards for tensor in shard.tensors}
        self.files_of = [tuple(dict.fromkeys(self.file_of[piece.name] for piece in output.pieces)) for output in job.outputs]
        self.writers: dict[str, ShardWriter] = {}
        self.closing: dict[str, ShardWriter] = {}
        """Complete, and being hashed and named."""
        self.whole: set[str] = set()
        self.waiting: dict[str, int] = dict.fromkeys((shard.file for shard in job.shards), 0)
        for unit in job.units:
            for file in self.files_of[unit.output]:
                self.waiting[file] += 1
        self._resume()

    def _resume(self) -> None:
        """A file with its final name is whole; a hidden part keeps its journalled slices; without either, all is to be done."""
        units_of: dict[str, list[Unit]] = {file: [] for file in self.waiting}
        for unit in self.job.units:
            for file in self.files_of[unit.output]:
                units_of[file].append(unit)
        for shard in self.job.shards:
            path = self.job.directory / shard.file
            done = all(self.job.journal.done(unit.key) for unit in units_of[shard.file])
            if path.exists() and done:
                self.whole.add(shard.file)
                continue
            if not part_name(path).exists():  # what was done of one that is gone must not pass for done once another is begun
                self.job.journal.forget(unit.key for unit in units_of[shard.file])
            self.writers[shard.file] = ShardWriter(path, shard.tensors)
        self.fresh = {file for file, writer in self.writers.items() if not writer.resumed}

    def is_done(self, unit: Unit) -> bool:
        return self.job.journal.done(unit.key) and not any(file in self.fresh for file in self.files_of[unit.output])

    def write(self, packed: Packed) -> None:
        for name, offset, part in packed.writes:
            file = self.file_of[name]
            if file in self.writers:
                self.writers[file].write(name, offset, part)

    def one_less(self, unit: Unit) -> Iterator[str]:
        """Files that waited for this slice last."""
        for file in self.files_of[unit.output]:
            self.waiting[file] -= 1
            if self.waiting[file] == 0 and file not in self.whole:
                yield file

    def sync(self) -> None:
        for writer in self.writers.values():
            writer.sync()

    def take(self, file: str) -> ShardWriter:
        """From here on nobody else writes to it or waits for it."""
        self.closing[file] = self.writers.pop(file)
        return self.closing[file]

    def close(self) -> None:
        for writer in (*self.writers.values(), *self.closing.values()):
            writer.close()


class _Loop:
    """Hands slices to the workers, a few ahead, and takes them back in order."""

    def __init__(self, job: Job, shards: _Shards, pool: ThreadPoolExecutor) -> None:
        self.job, self.shards, self.pool = job, shards, pool
        self.flying: deque[tuple[Unit, Future[Packed]]] = deque()
        self.pending: list[tuple[Unit, list[Any]]] = []
        self.unsynced_bytes = 0
        self.finishing: list[Future[tuple[str, str]]] = []

    def run(self) -> None:
        try:
            missing = [unit for unit in self.job.units if not self.shards.is_done(unit)]
            self.job.starting(missing)
            if self.job.calibration is not None:
                self.job.calibration.expect(self.job.outputs[unit.output] for unit in missing)
            for unit in self.job.units:
                if self.shards.is_done(unit):
                    self.job.settled([unit])
                    self._name(self._count(unit))  # complete, but killed before it got its name
                    continue
                self.flying.append((unit, self.pool.submit(self._work, unit)))
                if len(self.flying) > self.job.workers * QUEUED_PER_WORKER:
                    self._land()
            while self.flying:
                self._land()
            self._flush()
            self._collect()
        except BaseException:
            self.job.given_up()
            self.pool.shutdown(cancel_futures=True)  # a file may be closed only when nobody writes to it
            self._flush()
            raise
        finally:
            self.shards.close()

    def _work(self, unit: Unit) -> Packed:
        output = self.job.outputs[unit.output]
        measured = self.job.calibration
        inputs = None if measured is None or output.carried else measured.inputs(output)
        packed = pack_unit(output, unit, self.job.read(output), self.job.raw(output), inputs)
        if measured is not None:
            measured.done(output)
        self.shards.write(packed)
        return Packed((), packed.statistics) if packed.writes else packed

    def _land(self) -> None:
        unit, future = self.flying.popleft()
        found = future.result().statistics
        self.pending.append((unit, [found.squared_error, found.squared_weight, found.worst_squared, found.worst_group]))
        self.unsynced_bytes += (unit.stop - unit.start) * self.job.outputs[unit.output].row_bytes
        ready = self._count(unit)
        if ready or self.unsynced_bytes >= SYNC_BYTES or unit.key in self.job.flush_after:
            self._flush()
        self._name(ready)

    def _name(self, files: list[str]) -> None:
        self.finishing += [self.pool.submit(_finished, file, self.shards.take(file)) for file in files]

    def _count(self, unit: Unit) -> list[str]:
        self.job.progress((unit.stop - unit.start) * self.job.outputs[unit.output].row_bytes)
        return list(self.shards.one_less(unit))

    def _flush(self) -> None:
        """Bytes first, then the records that speak of them."""
        if not self.pending:
            return
        self.shards.sync()
        for unit, payload in self.pending:
            self.job.journal.record(unit.key, payload, sync=False)
        self.job.journal.sync()
        self.job.settled([unit for unit, _ in self.pending])
        self.pending.clear()
        self.unsynced_bytes = 0

    def _collect(self) -> None:
        self.job.digests.update(future.result() for future in self.finishing)
        for shard in self.job.shards:
            if shard.file in self.shards.whole:  # since an earlier run
                self.job.digests[shard.file] = file_digest(self.job.directory / shard.file)


def _finished(file: str, writer: ShardWriter) -> tuple[str, str]:
    return file, writer.finish()


def _statistics(job: Job) -> dict[int, Statistics]:
    """From the journal, so that slices of earlier runs count too."""
    from windlass.kernels.packing.statistics import total

    per_output: dict[int, list[tuple[int, Statistics]]] = {}
    for unit in job.units:
        error, weight, worst, group = job.journal.payload(unit.key)
        output = job.outputs[unit.output]
        groups_per_row = output.shape[-1] // output.stored.group if output.stored.group else 1
        per_output.setdefault(unit.output, []).append((unit.start * groups_per_row, Statistics(error, weight, worst, group)))
    return {index: total(blocks) for index, blocks in per_output.items()}
