"""Report of a conversion: sizes, errors, time, memory; as JSON and Markdown."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from windlass.core.model import Frozen
from windlass.runtime.kernels.packing.statistics import Statistics
from windlass.tasks.convert.outputs import ConvertedTensor
from windlass.units import format_bytes, format_seconds

WORST_SHOWN = 10


class TensorError(Frozen):
    name: str
    bits: int
    group: int | None
    relative_rms: float
    worst_group_rms: float


class FileRecord(Frozen):
    file: str
    num_bytes: int
    sha256: str


class ConvertReport(Frozen):
    model: str
    family: str
    source: str
    scheme: str
    group: int | None
    source_bytes: int
    """Of the source's weight files."""
    output_bytes: int
    relative_rms: float
    """Over all quantized weights."""
    tensors: tuple[TensorError, ...]
    """Quantized tensors, worst first."""
    kept: tuple[str, ...]
    """Patterns of matrices that were not quantized."""
    smaller_groups: tuple[str, ...]
    """Patterns of matrices whose row length is not a multiple of the requested group, with the group they use."""
    files: tuple[FileRecord, ...]
    seconds: float
    peak_memory_bytes: int
    instruction_set: str
    notes: tuple[str, ...] = ()

    @property
    def compression(self) -> float:
        return self.source_bytes / self.output_bytes if self.output_bytes else 0.0


def tensor_errors(outputs: tuple[ConvertedTensor, ...], statistics: dict[int, Statistics]) -> tuple[TensorError, ...]:
    made = [
        TensorError(
            name=output.name,
            bits=output.stored.bits,
            group=output.stored.group,
            relative_rms=statistics[index].relative_rms,
            worst_group_rms=statistics[index].worst_rms,
        )
        for index, output in enumerate(outputs)
        if output.packed
    ]
    return tuple(sorted(made, key=lambda one: one.relative_rms, reverse=True))


def overall_rms(outputs: tuple[ConvertedTensor, ...], statistics: dict[int, Statistics]) -> float:
    packed = [statistics[index] for index, output in enumerate(outputs) if output.packed]
    weight = sum(one.squared_weight for one in packed)
    return (sum(one.squared_error for one in packed) / weight) ** 0.5 if weight else 0.0


def peak_memory_bytes() -> int:
    """Peak resident memory. On Linux ru_maxrss includes the parent's peak from before the fork; VmHWM does not."""
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def markdown(report: ConvertReport) -> str:
    group = f", groups of {report.group}" if report.group else ""
    lines = [
        f"# {report.model}: {report.scheme}{group}",
        "",
        f"- from {report.source} ({report.family}), {format_bytes(report.source_bytes)}",
        f"- to {format_bytes(report.output_bytes)}, {report.compression:.2f} times smaller",
        f"- relative RMS error {report.relative_rms:.3%} over all quantized matrices",
        f"- {format_seconds(report.seconds)}, peak memory {format_bytes(report.peak_memory_bytes)} ({report.instruction_set} kernel)",
    ]
    lines += [f"- {note}" for note in report.notes]
    if report.smaller_groups:
        lines += ["", "## Smaller groups", "", *(f"- {text}" for text in report.smaller_groups)]
    if report.kept:
        lines += ["", "## Not quantized", "", *(f"- {text}" for text in report.kept)]
    if report.tensors:
        lines += ["", "## Largest errors", "", "| tensor | bits | group | relative RMS | worst group |", "|---|---|---|---|---|"]
        lines += [
            f"| {one.name} | {one.bits} | {one.group or '-'} | {one.relative_rms:.3%} | {one.worst_group_rms:.3%} |"
            for one in report.tensors[:WORST_SHOWN]
        ]
    lines += ["", "## Files", "", "| file | bytes | SHA-256 |", "|---|---|---|"]
    lines += [f"| {one.file} | {one.num_bytes:,} | `{one.sha256}` |" for one in report.files]
    return "\n".join(lines) + "\n"
