"""Text, JSONL and Parquet to token shards, and a report on their quality.

Units are done in any order by several processes and journalled as they are done, so that interrupted work goes on where it was.
Nothing looks finished until all of it is: files have hidden names until they are whole, and the manifest comes last.
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
from windlass.formats.disk.atomic import require_free, write_atomically, write_errors
from windlass.formats.disk.journal import Journal
from windlass.train.data.prepare.encoding import Encoder
from windlass.train.data.prepare.inputs import Inputs, Unit, find_inputs, refuse_inside
from windlass.train.data.prepare.near_duplicates import BANDS, MOST, Repeats, count_repeats
from windlass.train.data.prepare.processes import Advance, spread
from windlass.train.data.prepare.quality import Counts, added, percentiles
from windlass.train.data.prepare.unit import Done, Settings, open_encoder, open_work, run_unit, signature_file
from windlass.train.data.prepare.write_shards import token_type_for, write_manifest
from windlass.train.data.shards import MANIFEST, Manifest, read_manifest
from windlass.train.data.tokenizer import copy_tokenizer

JOURNAL = ".journal"
REPORT = "quality.json"
Started = Callable[[int], Advance]
"""Given all bytes, gives what is told of bytes that are done."""


class Report(Frozen):
    files: int
    bytes: int
    counts: Counts
    percentiles: dict[int, int]
    """Per cent of documents -> tokens that they have at most, about."""
    repeats: Repeats
    skipped: tuple[tuple[str, int], ...]
    """Endings of files that were left out, and how many."""
    seconds: float
    num_shards: int = 0
    validation_documents: int = 0
    validation_tokens: int = 0
    notes: tuple[str, ...] = ()


def prepare(
    sources: Sequence[str], out: Path, settings: Settings, *, jobs: int = 0, started: Started = lambda _: lambda _: None
) -> Report:
    begun = perf_counter()
    refuse_inside(sources, out)
    inputs = find_inputs(sources)
    encoder = open_encoder(settings)
    fingerprint = _fingerprint(inputs, encoder, settings)
    _refuse_finished(out)
    with write_errors(out, 0):
        out.mkdir(parents=True, exist_ok=True)
    require_free(out, inputs.num_bytes)  # tokens take about half of it, rarely all
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


def check(sources: Sequence[str], settings: Settings, *, jobs: int = 0, started: Started = lambda _: lambda _: None) -> Report:
    """Only the report; nothing is written."""
    begun = perf_counter()
    inputs = find_inputs(sources)
    open_encoder(settings)  # what is wrong with it shows before anything is begun
    with TemporaryDirectory(prefix="windlass-") as folder:
        signed = Path(folder)
        advance = started(inputs.num_bytes)
        with closing(_run(settings, None, signed, jobs, inputs.units, advance)) as finished:
            found = {unit.number: done for unit, done in finished}
        results = [found[unit.number] for unit in inputs.units]
        return _report(inputs, results, _signed(signed, inputs), None, perf_counter() - begun)


def _run(
    settings: Settings, out: Path | None, signed: Path, jobs: int, units: Sequence[Unit], advance: Callable[[int], None]
) -> Generator[tuple[Unit, Done]]:
    return spread(run_unit, units, jobs=jobs, advance=advance, begin=open_work, arguments=(settings, out, signed))


def _num_bytes(unit: Unit) -> int:
    return sum(piece.num_bytes for piece in unit.pieces)


def _fingerprint(inputs: Inputs, encoder: Encoder, settings: Settings) -> dict[str, object]:
    """All that the shards depend on."""
    return {
        "sources": inputs.digest,
        "tokenizer": encoder.fingerprint,
        "settings": msgspec.to_builtins(msgspec.structs.replace(settings, tokenizer="")),
    }


def _refuse_finished(out: Path) -> None:
    if (out / MANIFEST).exists():
        tokens = sum(shard.num_tokens for shard in read_manifest(out).shards)
        raise BadInput(f"{out} holds {tokens:,} tokens already; delete it to make it anew, or use another output directory")


def _resumed(journal: Journal, inputs: Inputs, out: Path) -> dict[int, Done]:
    """Units that were done, as far as their files are still there."""
    done: dict[int, Done] = {}
    for unit in inputs.units:
        if not journal.done(str(unit.number)):
            continue
        found = msgspec.convert(journal.payload(str(unit.number)), Done, str_keys=True)
        files = [out / f"{shard.name}.{ending}" for shard in found.shards for ending in shard.files]
        if all(file.exists() for file in (*files, signature_file(out, unit))):
            done[unit.number] = found
    return done


def _manifest(sources: Sequence[str], encoder: Encoder, results: list[Done]) -> Manifest:
    return Manifest(
        tokenizer=encoder.fingerprint,
        vocab_size=encoder.vocab_size,
        end_token=encoder.end,
        token_type=token_type_for(encoder.vocab_size),
        shards=tuple(shard for done in results for shard in done.shards),
        sources=tuple(sources),
    )


def _signed(folder: Path, inputs: Inputs) -> Repeats:
    parts = [np.empty((0, 1 + BANDS), np.uint64)]
    for unit in inputs.units:
        if sum(map(len, parts)) < MOST:
            parts.append(np.fromfile(signature_file(folder, unit), np.uint64).reshape(-1, 1 + BANDS))
    return count_repeats(np.concatenate(parts))


def _report(inputs: Inputs, results: list[Done], repeats: Repeats, manifest: Manifest | None, seconds: float) -> Report:
    counts = added([done.counts for done in results])
    held = manifest.of_split("validation") if manifest else ()
    return Report(
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


def _finish(out: Path, inputs: Inputs, manifest: Manifest, report: Report, encoder: Encoder, template: str | None) -> None:
    if not manifest.shards:
        raise BadInput(
            f"nothing was found to learn: {report.counts.empty} documents are empty and {report.counts.bad} cannot be read"
        )
    copy_tokenizer(encoder.path, encoder.tokenizer, out, template)
    write_atomically(out / REPORT, msgspec.json.format(msgspec.json.encode(report), indent=1))
    write_manifest(out, manifest)
    for unit in inputs.units:
        signature_file(out, unit).unlink(missing_ok=True)
