"""The conversion loop: worker threads read, quantize and write slices; a journal makes it resumable after a kill.

A slice is journalled after its bytes are on disk; one that is not journalled is done again and gives the same bytes at the same
offset. The output directory does not look like a model until it is complete: shards have hidden names until then, and
config.json is written last.
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

from windlass.model.formats.disk.atomic import part_name
from windlass.model.formats.disk.journal import Journal
from windlass.model.formats.safetensors.shards import OutTensor, SafetensorsShard
from windlass.model.formats.safetensors.writer import SafetensorsWriter, file_digest
from windlass.runtime.kernels.packing.statistics import Statistics
from windlass.runtime.weights.tensors.readers import ReadRows
from windlass.tasks.convert.calibration import Calibration
from windlass.tasks.convert.outputs import ConvertedTensor
from windlass.tasks.convert.pack import PackedRows, RawBlocks, pack_slice
from windlass.tasks.convert.slices import LARGEST_BYTES, RowSlice
from windlass.units import MIB

SYNC_BYTES = 256 * MIB
"""Bytes written between two fdatasyncs: what a power cut may lose, and enough to make the sync cheap."""
QUEUED_PER_WORKER = 2
M_MMAP_THRESHOLD = -3
"""Of mallopt(3)."""

Progress = Callable[[int], None]
"""Called with the source bytes of each finished slice, at 16 bits per weight."""


@dataclass
class ConversionJob:
    """Everything the workers share, and their progress."""

    outputs: tuple[ConvertedTensor, ...]
    units: tuple[RowSlice, ...]
    shards: tuple[SafetensorsShard, ...]
    read: Callable[[ConvertedTensor], ReadRows]
    raw: Callable[[ConvertedTensor], RawBlocks | None]
    directory: Path
    journal: Journal
    workers: int
    progress: Progress = lambda _: None
    on_start: Callable[[list[RowSlice]], None] = lambda _: None
    """Called with the slices still to do, before anything is read."""
    flush_after: frozenset[str] = frozenset()
    """Keys of slices after which to sync at once: the last ones of a source file that can then be deleted."""
    on_synced: Callable[[list[RowSlice]], None] = lambda _: None
    """Called with slices whose bytes are on disk."""
    calibration: Calibration | None = None
    """Second moments of every matrix's inputs; None: plain round-to-nearest with a scale search."""
    on_abort: Callable[[], None] = lambda: None
    """Called when nothing more will be read, so that workers waiting for the source stop waiting."""
    digests: dict[str, str] = field(default_factory=dict[str, str])


def _keep_heaps_small() -> None:
    """glibc raises its mmap threshold up to 32 MB and then keeps freed buffers in the heap, several times what is in use. Cap it at a slice."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_BYTES + MIB)


def out_tensors(outputs: tuple[ConvertedTensor, ...]) -> list[OutTensor]:
    return [tensor for output in outputs for tensor in output.file_tensors]


def run(job: ConversionJob) -> dict[int, Statistics]:
    """Writes every shard; returns each output's quantization error. Re-raises what a worker raised, with the journal up to date."""
    threads = torch.get_num_threads()
    _keep_heaps_small()
    torch.set_num_threads(1)  # slices are the parallelism; threads within a slice would oversubscribe the cores
    try:
        shards = _Shards(job)
        with ThreadPoolExecutor(job.workers, thread_name_prefix="convert") as pool:
            _Loop(job, shards, pool).run()
    finally:
        torch.set_num_threads(threads)
    return _statistics(job)


class _Shards:
    """The output files and how many slices each still waits for."""

    def __init__(self, job: ConversionJob) -> None:
        self.job = job
        self.file_of = {tensor.name: shard.file for shard in job.shards for tensor in shard.tensors}
        self.files_of = [
            tuple(dict.fromkeys(self.file_of[piece.name] for piece in output.file_tensors)) for output in job.outputs
        ]
        self.writers: dict[str, SafetensorsWriter] = {}
        self.closing: dict[str, SafetensorsWriter] = {}
        """Complete; being hashed and renamed."""
        self.whole: set[str] = set()
        self.waiting: dict[str, int] = dict.fromkeys((shard.file for shard in job.shards), 0)
        for unit in job.units:
            for file in self.files_of[unit.output]:
                self.waiting[file] += 1
        self._resume()

    def _resume(self) -> None:
        """A file with its final name is complete; a hidden part keeps its journalled slices; without either, everything is redone."""
        units_of: dict[str, list[RowSlice]] = {file: [] for file in self.waiting}
        for unit in self.job.units:
            for file in self.files_of[unit.output]:
                units_of[file].append(unit)
        for shard in self.job.shards:
            path = self.job.directory / shard.file
            done = all(self.job.journal.done(unit.key) for unit in units_of[shard.file])
            if path.exists() and done:
                self.whole.add(shard.file)
                continue
            if not part_name(path).exists():  # slices written to a lost part must not count as done once a new one is begun
                self.job.journal.forget(unit.key for unit in units_of[shard.file])
            self.writers[shard.file] = SafetensorsWriter(path, shard.tensors)
        self.fresh = {file for file, writer in self.writers.items() if not writer.resumed}

    def is_done(self, unit: RowSlice) -> bool:
        return self.job.journal.done(unit.key) and not any(file in self.fresh for file in self.files_of[unit.output])

    def write(self, packed: PackedRows) -> None:
        for name, offset, part in packed.writes:
            file = self.file_of[name]
            if file in self.writers:
                self.writers[file].write(name, offset, part)

    def completed_by(self, unit: RowSlice) -> Iterator[str]:
        """Files for which this was the last slice."""
        for file in self.files_of[unit.output]:
            self.waiting[file] -= 1
            if self.waiting[file] == 0 and file not in self.whole:
                yield file

    def sync(self) -> None:
        for writer in self.writers.values():
            writer.sync()

    def take(self, file: str) -> SafetensorsWriter:
        """Hands the writer over to be finished; nobody else writes to it from here on."""
        self.closing[file] = self.writers.pop(file)
        return self.closing[file]

    def close(self) -> None:
        for writer in (*self.writers.values(), *self.closing.values()):
            writer.close()


class _Loop:
    """Submits slices to the pool, a bounded number ahead, and collects them in order."""

    def __init__(self, job: ConversionJob, shards: _Shards, pool: ThreadPoolExecutor) -> None:
        self.job, self.shards, self.pool = job, shards, pool
        self.in_flight: deque[tuple[RowSlice, Future[PackedRows]]] = deque()
        self.pending: list[tuple[RowSlice, list[Any]]] = []
        self.unsynced_bytes = 0
        self.finishing: list[Future[tuple[str, str]]] = []

    def run(self) -> None:
        try:
            missing = [unit for unit in self.job.units if not self.shards.is_done(unit)]
            self.job.on_start(missing)
            if self.job.calibration is not None:
                self.job.calibration.expect(self.job.outputs[unit.output] for unit in missing)
            for unit in self.job.units:
                if self.shards.is_done(unit):
                    self.job.on_synced([unit])
                    self._finish_files(self._count_done(unit))  # complete, but killed before the rename
                    continue
                self.in_flight.append((unit, self.pool.submit(self._work, unit)))
                if len(self.in_flight) > self.job.workers * QUEUED_PER_WORKER:
                    self._collect_next()
            while self.in_flight:
                self._collect_next()
            self._flush()
            self._collect_digests()
        except BaseException:
            self.job.on_abort()
            self.pool.shutdown(cancel_futures=True)  # no file may be closed while a worker writes to it
            self._flush()
            raise
        finally:
            self.shards.close()

    def _work(self, unit: RowSlice) -> PackedRows:
        output = self.job.outputs[unit.output]
        measured = self.job.calibration
        inputs = None if measured is None or output.carried else measured.inputs(output)
        packed = pack_slice(output, unit, self.job.read(output), self.job.raw(output), inputs)
        if measured is not None:
            measured.done(output)
        self.shards.write(packed)
        return PackedRows((), packed.statistics) if packed.writes else packed

    def _collect_next(self) -> None:
        unit, future = self.in_flight.popleft()
        found = future.result().statistics
        self.pending.append((unit, [found.squared_error, found.squared_weight, found.worst_squared, found.worst_group]))
        self.unsynced_bytes += (unit.stop - unit.start) * self.job.outputs[unit.output].row_bytes
        ready = self._count_done(unit)
        if ready or self.unsynced_bytes >= SYNC_BYTES or unit.key in self.job.flush_after:
            self._flush()
        self._finish_files(ready)

    def _finish_files(self, files: list[str]) -> None:
        self.finishing += [self.pool.submit(_finished, file, self.shards.take(file)) for file in files]

    def _count_done(self, unit: RowSlice) -> list[str]:
        self.job.progress((unit.stop - unit.start) * self.job.outputs[unit.output].row_bytes)
        return list(self.shards.completed_by(unit))

    def _flush(self) -> None:
        """Data first, then the journal records that refer to it."""
        if not self.pending:
            return
        self.shards.sync()
        for unit, payload in self.pending:
            self.job.journal.record(unit.key, payload, sync=False)
        self.job.journal.sync()
        self.job.on_synced([unit for unit, _ in self.pending])
        self.pending.clear()
        self.unsynced_bytes = 0

    def _collect_digests(self) -> None:
        self.job.digests.update(future.result() for future in self.finishing)
        for shard in self.job.shards:
            if shard.file in self.shards.whole:  # finished by an earlier run
                self.job.digests[shard.file] = file_digest(self.job.directory / shard.file)


def _finished(file: str, writer: SafetensorsWriter) -> tuple[str, str]:
    return file, writer.finish()


def _statistics(job: ConversionJob) -> dict[int, Statistics]:
    """Read from the journal, so that slices of earlier runs count too."""
    from windlass.runtime.kernels.packing.statistics import total

    per_output: dict[int, list[tuple[int, Statistics]]] = {}
    for unit in job.units:
        error, weight, worst, group = job.journal.payload(unit.key)
        output = job.outputs[unit.output]
        groups_per_row = output.shape[-1] // output.stored.group if output.stored.group else 1
        per_output.setdefault(unit.output, []).append((unit.start * groups_per_row, Statistics(error, weight, worst, group)))
    return {index: total(blocks) for index, blocks in per_output.items()}
