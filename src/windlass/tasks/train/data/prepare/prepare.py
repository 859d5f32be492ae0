"""Prepares text, JSONL and Parquet as token shards, with a quality report.

Work units run in parallel and are journalled when done, so that interrupted work can be resumed. Output is atomic: files have hidden
names until they are complete, and the manifest is written last.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import msgspec
import numpy as np

from windlass.core.model import Frozen
from windlass.errors import BadInput
from windlass.model.formats.disk.atomic import require_free, write_atomically, write_errors
from windlass.model.formats.disk.journal import Journal
from windlass.tasks.train.data.prepare.encoding import Encoder
from windlass.tasks.train.data.prepare.inputs import SourceFiles, WorkUnit, find_inputs, refuse_inside
from windlass.tasks.train.data.prepare.near_duplicates import BANDS, MOST, DuplicateCounts, count_duplicates
from windlass.tasks.train.data.prepare.processes import Advance, run_parallel
from windlass.tasks.train.data.prepare.quality import QualityCounts, merge_counts, percentiles
from windlass.tasks.train.data.prepare.unit import PrepareSettings, UnitResult, open_encoder, open_work, run_unit, signature_file
from windlass.tasks.train.data.prepare.write_shards import token_type_for, write_manifest
from windlass.tasks.train.data.shards import MANIFEST, ShardManifest, read_manifest
from windlass.tasks.train.data.tokenizer import copy_tokenizer

JOURNAL = ".journal"
REPORT = "quality.json"
Started = Callable[[int], Advance]
"""Called with the total bytes; returns the progress callback."""


class QualityReport(Frozen):
    files: int
    bytes: int
    counts: QualityCounts
    percentiles: dict[int, int]
    """Percentile of documents -> length in tokens, approximately."""
    repeats: DuplicateCounts
    skipped: tuple[tuple[str, int], ...]
    """Suffixes of skipped files, with counts."""
    seconds: float
    num_shards: int = 0
    validation_documents: int = 0
    validation_tokens: int = 0
    notes: tuple[str, ...] = ()


def prepare(
    sources: Sequence[str], out: Path, settings: PrepareSettings, *, jobs: int = 0, started: Started = lambda _: lambda _: None
) -> QualityReport:
    begun = perf_counter()
    refuse_inside(sources, out)
    inputs = find_inputs(sources)
    encoder = open_encoder(settings)
    fingerprint = _fingerprint(inputs, encoder, settings)
    _refuse_finished(out)
    with write_errors(out, 0):
        out.mkdir(parents=True, exist_ok=True)
    require_free(out, inputs.num_bytes)  # tokens usually take about half of it
    journal = Journal(out / JOURNAL, fingerprint)
    try:
        done = _resumed(journal, inputs, out)
        advance = started(inputs.num_bytes)
        advance(sum(_num_bytes(unit) for unit in inputs.units if unit.number in done))
        missing = [unit for unit in inputs.units if unit.number not in done]
        with closing(_run(settings, out, out, jobs, missing, advance)) as finished:
            for unit, result in finished:
                journal.record(str(unit.number), msgspec.to_builtins(result))
                done[unit.number] = result
        results = [done[unit.number] for unit in inputs.units]
        manifest = _manifest(sources, encoder, results)
        report = _report(inputs, results, _signed(out, inputs), manifest, perf_counter() - begun)
        _finish(out, inputs, manifest, report, encoder, settings.template)
        journal.remove()
    finally:
        journal.close()
    return report


def check(
    sources: Sequence[str], settings: PrepareSettings, *, jobs: int = 0, started: Started = lambda _: lambda _: None
) -> QualityReport:
    """Only reports; writes nothing."""
    begun = perf_counter()
    inputs = find_inputs(sources)
    open_encoder(settings)  # fails before any work is started
    with TemporaryDirectory(prefix="windlass-") as folder:
        signed = Path(folder)
        advance = started(inputs.num_bytes)
        with closing(_run(settings, None, signed, jobs, inputs.units, advance)) as finished:
            found = {unit.number: done for unit, done in finished}
        results = [found[unit.number] for unit in inputs.units]
        return _report(inputs, results, _signed(signed, inputs), None, perf_counter() - begun)


def _run(
    settings: PrepareSettings,
    out: Path | None,
    signed: Path,
    jobs: int,
    units: Sequence[WorkUnit],
    advance: Callable[[int], None],
) -> Generator[tuple[WorkUnit, UnitResult]]:
    return run_parallel(run_unit, units, jobs=jobs, advance=advance, begin=open_work, arguments=(settings, out, signed))


def _num_bytes(unit: WorkUnit) -> int:
    return sum(piece.num_bytes for piece in unit.pieces)


def _fingerprint(inputs: SourceFiles, encoder: Encoder, settings: PrepareSettings) -> dict[str, object]:
    """Everything that the shards depend on."""
    return {
        "sources": inputs.digest,
        "tokenizer": encoder.fingerprint,
        "settings": msgspec.to_builtins(msgspec.structs.replace(settings, tokenizer="")),
    }


def _refuse_finished(out: Path) -> None:
    if (out / MANIFEST).exists():
        tokens = sum(shard.num_tokens for shard in read_manifest(out).shards)
        raise BadInput(f"{out} already has {tokens:,} tokens; delete it, or use another output directory")


def _resumed(journal: Journal, inputs: SourceFiles, out: Path) -> dict[int, UnitResult]:
    """Finished units whose files still exist."""
    done: dict[int, UnitResult] = {}
    for unit in inputs.units:
        if not journal.done(str(unit.number)):
            continue
        found = msgspec.convert(journal.payload(str(unit.number)), UnitResult, str_keys=True)
        files = [out / f"{shard.name}.{ending}" for shard in found.shards for ending in shard.files]
        if all(file.exists() for file in (*files, signature_file(out, unit))):
            done[unit.number] = found
    return done


def _manifest(sources: Sequence[str], encoder: Encoder, results: list[UnitResult]) -> ShardManifest:
    return ShardManifest(
        tokenizer=encoder.fingerprint,
        vocab_size=encoder.vocab_size,
        end_token=encoder.end,
        token_type=token_type_for(encoder.vocab_size),
        shards=tuple(shard for done in results for shard in done.shards),
        sources=tuple(sources),
    )


def _signed(folder: Path, inputs: SourceFiles) -> DuplicateCounts:
    parts = [np.empty((0, 1 + BANDS), np.uint64)]
    for unit in inputs.units:
        if sum(map(len, parts)) < MOST:
            parts.append(np.fromfile(signature_file(folder, unit), np.uint64).reshape(-1, 1 + BANDS))
    return count_duplicates(np.concatenate(parts))


def _report(
    inputs: SourceFiles, results: list[UnitResult], repeats: DuplicateCounts, manifest: ShardManifest | None, seconds: float
) -> QualityReport:
    counts = merge_counts([done.counts for done in results])
    held = manifest.of_split("validation") if manifest else ()
    return QualityReport(
        files=inputs.num_files,
        bytes=inputs.num_bytes,
        counts=counts,
        percentiles=percentiles(counts),
        repeats=repeats,
        skipped=inputs.skipped,
        seconds=seconds,
        num_shards=len(manifest.shards) if manifest else 0,
        validation_documents=sum(shard.num_documents for shard in held),
        validation_tokens=sum(shard.num_tokens for shard in held),
    )


def _finish(
    out: Path, inputs: SourceFiles, manifest: ShardManifest, report: QualityReport, encoder: Encoder, template: str | None
) -> None:
    if not manifest.shards:
        raise BadInput(f"no usable documents: {report.counts.empty} are empty and {report.counts.bad} unreadable")
    copy_tokenizer(encoder.path, encoder.tokenizer, out, template)
    write_atomically(out / REPORT, msgspec.json.format(msgspec.json.encode(report), indent=1))
    write_manifest(out, manifest)
    for unit in inputs.units:
        signature_file(out, unit).unlink(missing_ok=True)
