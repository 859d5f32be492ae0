"""Converts a checkpoint: open, check, plan the output, run, and write config.json last."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec

from windlass.core.model import Frozen
from windlass.core.ports import BlockStore
from windlass.core.scheme import Scheme
from windlass.errors import BadInput
from windlass.model.formats.disk.atomic import require_free, write_atomically
from windlass.model.formats.disk.journal import Journal
from windlass.model.formats.safetensors.shards import MAX_SHARD_BYTES, plan_shards, write_index
from windlass.runtime.kernels.packing.statistics import Statistics
from windlass.runtime.weights.source import OpenedModel, open_source
from windlass.runtime.weights.tensors.readers import reader
from windlass.tasks.convert.calibration import Calibration
from windlass.tasks.convert.outputs import ConvertedTensor, PackingChoices, converted_tensors, total_bytes
from windlass.tasks.convert.quantization import patterns, quantization_config
from windlass.tasks.convert.report import ConvertReport, FileRecord, markdown, overall_rms, peak_memory_bytes, tensor_errors
from windlass.tasks.convert.run import ConversionJob, out_tensors, run
from windlass.tasks.convert.slices import affordable_jobs, row_slices, slice_bytes_for
from windlass.tasks.convert.stream_order import attach_stream, order_by_arrival
from windlass.tasks.convert.streamed import StreamedStore
from windlass.tasks.convert.validate import copyable_blocks, locate_sources
from windlass.units import GB

JOURNAL = ".windlass-convert.journal"
REPORT = "windlass-report"

# torch_dtype of the config -> dtype of unquantized tensors; fp32 sources become bf16.
HIGH_DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "BF16"}


class ConvertSettings(Frozen):
    """Options of a conversion."""

    scheme: Scheme
    max_memory_bytes: int = 2 * GB
    jobs: int = 0
    """Worker threads; 0: one per core."""
    keep: tuple[str, ...] = ()
    mtp: bool = True
    verify: bool = False
    samples: tuple[tuple[int, ...], ...] = ()
    """Calibration sequences of equal length (int4); empty: no calibration."""
    max_shard_bytes: int = MAX_SHARD_BYTES


StartProgress = Callable[[int], Callable[[int], None]]
"""Called with the total bytes; returns the callback for the bytes of each finished slice."""


def convert(
    source: Path, directory: Path, settings: ConvertSettings, started: StartProgress = lambda _: lambda _: None
) -> ConvertReport:
    return convert_opened(open_source(source), directory, settings, started)


def convert_opened(
    opened: OpenedModel, directory: Path, settings: ConvertSettings, started: StartProgress = lambda _: lambda _: None
) -> ConvertReport:
    began = time.monotonic()
    try:
        return _convert(opened, directory, settings, started, began)
    finally:
        opened.store.close()


def _convert(
    opened: OpenedModel, directory: Path, settings: ConvertSettings, started: StartProgress, began: float
) -> ConvertReport:
    choices = _choices(opened, settings)
    planned = converted_tensors(opened.spec, opened.rules, choices)
    locations = locate_sources(planned, opened.store, ignore_next_token=not settings.mtp)
    planned = tuple(output for output in planned if output.name in locations)
    stream = opened.store if isinstance(opened.store, StreamedStore) else None
    _prepare(directory, planned, stream)
    jobs = settings.jobs or len(os.sched_getaffinity(0))
    jobs = affordable_jobs(planned, settings.max_memory_bytes, jobs)
    slice_bytes = slice_bytes_for(settings.max_memory_bytes, jobs)
    slices = tuple(row_slices(planned, slice_bytes))
    if stream is not None:
        slices = order_by_arrival(slices, planned, locations, stream)
    journal = Journal(directory / JOURNAL, _fingerprint(opened, choices, slice_bytes, settings.max_shard_bytes, settings.samples))
    try:
        job = ConversionJob(
            outputs=planned,
            units=slices,
            shards=plan_shards(out_tensors(planned), settings.max_shard_bytes),
            read=lambda output: reader(opened.store, output, locations[output.name]),
            raw=lambda output: _raw(opened, output),
            directory=directory,
            journal=journal,
            workers=jobs,
            calibration=_calibration(opened, settings),
            progress=started(sum((one.stop - one.start) * planned[one.output].row_bytes for one in slices)),
        )
        if stream is not None:
            attach_stream(job, locations, stream)
        statistics = run(job)
        report = _report(opened, planned, settings, statistics, job.digests, directory, began)
        if settings.verify:
            report = _verified(report, job)
        _finish(opened, job, settings, report)
    except BaseException:
        journal.close()
        raise
    journal.remove()
    return report


def _calibration(opened: OpenedModel, settings: ConvertSettings) -> Calibration | None:
    if not settings.samples:
        return None
    import torch

    return Calibration(opened, torch.tensor(settings.samples))


def _verified(report: ConvertReport, job: ConversionJob) -> ConvertReport:
    from windlass.tasks.convert.verify import WrittenFiles, verify

    written = WrittenFiles(job.directory, [record.file for record in report.files])
    try:
        compared = verify(job.outputs, job.units, job.read, written, job.workers, calibrated=job.calibration is not None)
    finally:
        written.close()
    return msgspec.structs.replace(
        report, notes=(*report.notes, f"verified: {compared} tensors read back and compared with the source")
    )


def _choices(opened: OpenedModel, settings: ConvertSettings) -> PackingChoices:
    return PackingChoices(
        scheme=settings.scheme,
        high_dtype=_high_dtype(opened.config),
        keep=settings.keep,
        mtp=settings.mtp,
        carried=copyable_blocks(opened.blocks, settings.scheme.bits),
    )


def _high_dtype(config: dict[str, Any]) -> str:
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix("torch.")
    return HIGH_DTYPES.get(dtype, "BF16")


def _finished(directory: Path) -> bool:
    """A finished model is never overwritten. With a journal still there it was interrupted at the very end, and is resumed."""
    try:
        return (directory / "config.json").exists() and not (directory / JOURNAL).exists()
    except OSError as error:
        raise BadInput(f"{directory} cannot be used: {error.strerror}") from None


def _prepare(directory: Path, planned: tuple[ConvertedTensor, ...], stream: StreamedStore | None) -> None:
    """Creates the output directory, or accepts an unfinished one, and checks free disk space."""
    if _finished(directory):
        if stream is not None:
            stream.remove()
        raise BadInput(f"{directory} already holds a model; delete it or choose another output directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{directory} cannot be created: {error.strerror}") from None
    there = sum(file.stat().st_size for file in directory.iterdir() if file.is_file())
    arriving = stream.most_bytes if stream is not None else 0
    require_free(directory, max(total_bytes(planned) - there, 0) + arriving)


def _samples_digest(samples: tuple[tuple[int, ...], ...]) -> str:
    return hashlib.sha256(msgspec.json.encode(samples)).hexdigest() if samples else ""


def _fingerprint(
    opened: OpenedModel, choices: PackingChoices, slice_bytes: int, max_shard_bytes: int, samples: tuple[tuple[int, ...], ...]
) -> dict[str, Any]:
    """The keys appear in the error message when a conversion is resumed with other settings."""
    return {
        "source": opened.digest,
        "choices": msgspec.to_builtins(choices),
        "memory per worker (--max-memory, --jobs)": slice_bytes,
        "shard size": max_shard_bytes,
        "calibration samples (--calibrate)": _samples_digest(samples),
    }


def _raw(opened: OpenedModel, output: ConvertedTensor) -> Callable[[int, int], Any] | None:
    if not output.carried:
        return None

    def rows(start: int, stop: int) -> Any:
        import torch

        _, blocks = cast(BlockStore, opened.store).raw_blocks(output.name, start, stop)
        return torch.frombuffer(blocks, dtype=torch.uint8).view(stop - start, -1)

    return rows


def _report(
    opened: OpenedModel,
    planned: tuple[ConvertedTensor, ...],
    settings: ConvertSettings,
    statistics: dict[int, Statistics],
    digests: dict[str, str],
    directory: Path,
    began: float,
) -> ConvertReport:
    from windlass.runtime.kernels.packing.quantize import instruction_set

    usual = settings.scheme.group
    others = [one for one in planned if one.packed and not one.carried and one.stored.group != usual]
    smaller = [
        f"{name}: groups of {group}"
        for group in sorted({one.stored.group or 0 for one in others}, reverse=True)
        for name in patterns([one.module for one in others if one.stored.group == group], [])
    ]
    kept = [one.module for one in planned if not one.packed and len(one.shape) == 2]
    return ConvertReport(
        model=opened.spec.name,
        family=opened.spec.family,
        source=opened.name,
        scheme=settings.scheme.name,
        group=usual,
        source_bytes=opened.num_bytes,
        output_bytes=total_bytes(planned),
        relative_rms=overall_rms(planned, statistics),
        tensors=tensor_errors(planned, statistics),
        kept=tuple(patterns(kept, [])),
        smaller_groups=tuple(smaller),
        files=tuple(
            FileRecord(file=file, num_bytes=(directory / file).stat().st_size, sha256=digest)
            for file, digest in sorted(digests.items())
        ),
        seconds=time.monotonic() - began,
        peak_memory_bytes=peak_memory_bytes(),
        instruction_set=instruction_set(),
        notes=_notes(planned) + _calibrated_note(settings),
    )


def _notes(planned: tuple[ConvertedTensor, ...]) -> tuple[str, ...]:
    made: list[str] = []
    carried = sum(1 for one in planned if one.carried)
    if carried:
        made.append(f"{carried} matrices were already in Q4_0 or Q8_0 blocks: their codes were copied, not quantized again")
    if any(one.packed and one.rule.sources[0].transposed for one in planned):
        made.append("matrices that the source stores [in, out] are quantized as [out, in]; only Windlass reads them in this form")
    if any(one.stored.zero_points and one.expert is not None for one in planned):
        made.append(
            "experts have zero points, which vLLM and transformers do not support; convert without --asymmetric to use them there"
        )
    return tuple(made)


def _calibrated_note(settings: ConvertSettings) -> tuple[str, ...]:
    if not settings.samples:
        return ()
    tokens = len(settings.samples) * len(settings.samples[0])
    return (f"calibrated on {tokens:,} tokens: minimises the error of layer outputs, so the error of single weights is larger",)


def _finish(opened: OpenedModel, job: ConversionJob, settings: ConvertSettings, report: ConvertReport) -> None:
    """Tokenizer files, index and report; config.json last, since it makes the directory a model."""
    directory = job.directory
    for file in opened.companions:
        write_atomically(directory / file.name, file.read_bytes())
    if opened.kind == "gguf":
        from windlass.model.text.tokenize.gguf_tokenizer import write_tokenizer
        from windlass.runtime.weights.stores.gguf import GgufStore

        write_tokenizer(cast(GgufStore, opened.store).metadata, directory)
    if isinstance(opened.store, StreamedStore):
        opened.store.remove()
    write_index(directory, job.shards)
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=1)
    write_atomically(directory / f"{REPORT}.json", encoded)
    write_atomically(directory / f"{REPORT}.md", markdown(report).encode())
    config = {key: value for key, value in opened.config.items() if key not in ("quantization_config", "auto_map")}
    quantization = quantization_config(job.outputs, settings.scheme)
    if quantization is not None:
        config["quantization_config"] = quantization
    if not settings.mtp or opened.spec.next_token is None:
        config = {**config, **({"num_nextn_predict_layers": 0} if "num_nextn_predict_layers" in config else {})}
    name = "dtype" if "dtype" in config else "torch_dtype"
    config[name] = {"BF16": "bfloat16", "F16": "float16"}[_high_dtype(config)]
    write_atomically(directory / "config.json", msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n")
