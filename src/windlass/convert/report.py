"""What a conversion did: sizes, errors, time, memory; as JSON for machines and Markdown for people."""

from __future__ import annotations

from windlass.convert.outputs import ConvertedTensor
from windlass.core.model import Frozen
from windlass.kernels.packing.statistics import Statistics
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
    """Of the weights that were read, as they are stored."""
    output_bytes: int
    relative_rms: float
    """Over all packed weights together."""
    tensors: tuple[TensorError, ...]
    """Packed ones, worst first."""
    kept: tuple[str, ...]
    """Kinds of matrices that stay in high precision."""
    smaller_groups: tuple[str, ...]
    """Matrices whose rows the asked-for group does not divide, with the group they took."""
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


def markdown(report: ConvertReport) -> str:
    group = f", groups of {report.group}" if report.group else ""
    lines = [
        f"# {report.model}: {report.scheme}{group}",
        "",
        f"- from {report.source} ({report.family}), {format_bytes(report.source_bytes)}",
        f"- to {format_bytes(report.output_bytes)}, {report.compression:.2f} times smaller",
        f"- error {report.relative_rms:.3%} of the weights' RMS over all packed matrices",
        f"- {format_seconds(report.seconds)}, {format_bytes(report.peak_memory_bytes)} of memory at most ({report.instruction_set} loop)",
    ]
    lines += [f"- {note}" for note in report.notes]
    if report.smaller_groups:
        lines += ["", "## Rows that the group does not divide", "", *(f"- {text}" for text in report.smaller_groups)]
    if report.kept:
        lines += ["", "## In high precision", "", *(f"- {text}" for text in report.kept)]
    if report.tensors:
        lines += ["", "## Largest errors", "", "| tensor | bits | group | relative RMS | worst group |", "|---|---|---|---|---|"]
        lines += [
            f"| {one.name} | {one.bits} | {one.group or '-'} | {one.relative_rms:.3%} | {one.worst_group_rms:.3%} |"
            for one in report.tensors[:WORST_SHOWN]
        ]
    lines += ["", "## Files", "", "| file | bytes | SHA-256 |", "|---|---|---|"]
    lines += [f"| {one.file} | {one.num_bytes:,} | `{one.sha256}` |" for one in report.files]
    return "\n".join(lines) + "\n"
