"""Benchmark report: JSON encoding, and comparison with an earlier one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import msgspec

from windlass.core.constants import DECODE_ERRORS
from windlass.core.model import Frozen
from windlass.core.tiers.stats import TierStats
from windlass.errors import BadInput
from windlass.tasks.bench.limits import MachineLimits
from windlass.tasks.bench.work import WeightBytes

REPORT_VERSION = 1


class BatchResult(Frozen):
    """Results for `batch` concurrent sequences of equal length."""

    batch: int
    prompt_tokens: int
    new_tokens: int
    prefill_tokens_per_second: float
    """All prompts together."""
    time_to_first_token_seconds: float
    """Of the last sequence to start."""
    decode_tokens_per_second: float
    """All sequences together, from the median step, which is robust against other load on the machine."""
    mean_decode_tokens_per_second: float
    step_seconds: float
    """Median of the decode steps."""
    step_read_bytes: float
    """Weights and KV cache that a decode step must read."""
    step_weight_bytes: float
    step_kv_bytes: float
    step_flops: float
    prefill_flops: float
    """Of all prompts together."""
    prefill_seconds: float
    python_share: float | None = None
    """Share of a decode step outside the kernels; None where they were not timed."""
    experts_touched: float | None = None
    """Routed experts read per layer by the last step, on average; None where the kernels do not report it."""
    tokens_per_step: float = 1.0
    """Of each sequence: more than one where drafts were accepted. Then decode_tokens_per_second is the mean."""

    @property
    def read_bytes_per_second(self) -> float:
        return self.step_read_bytes / self.step_seconds

    @property
    def decode_flops_per_second(self) -> float:
        return self.step_flops / self.step_seconds

    @property
    def prefill_flops_per_second(self) -> float:
        return self.prefill_flops / self.prefill_seconds

    def read_share(self, limits: MachineLimits) -> float:
        """Share of this machine's memory bandwidth."""
        return self.read_bytes_per_second / limits.read_bytes_per_second

    def decode_flops_share(self, limits: MachineLimits) -> float:
        """Share of the matmul limit. Integer kernels for quantized weights may exceed the float limit."""
        return self.decode_flops_per_second / limits.matmul_flops

    def prefill_flops_share(self, limits: MachineLimits) -> float:
        return self.prefill_flops_per_second / limits.matmul_flops

    def memory_limit_tokens_per_second(self, limits: MachineLimits) -> float:
        """Upper bound from memory bandwidth alone."""
        return self.batch * limits.read_bytes_per_second / self.step_read_bytes


class RankTimes(Frozen):
    """Time breakdown of a decode step on one rank."""

    rank: int
    node: str
    compute_seconds: float
    waiting_seconds: float
    """Waiting for other ranks or for the next step from rank 0."""
    wire_seconds: float
    """In collectives, without waiting."""
    sent_bytes: float
    received_bytes: float


class SplitResult(Frozen):
    """Results of a model split over several ranks."""

    layout: str
    sync: str = "exact"
    predicted_tokens_per_second: float = 0.0
    """For one sequence, from the plan; 0: no prediction."""
    ranks: tuple[RankTimes, ...] = ()
    """For the first batch."""


class MemoryUse(Frozen):
    weights: WeightBytes
    kv_bytes: int
    resident_bytes: int
    """Process memory once the model is loaded; on an accelerator, device memory."""
    loading_peak_bytes: int
    planned_bytes: int | None = None
    """Prediction of the plan."""

    @property
    def over_plan(self) -> float | None:
        """0.03: three per cent more than planned."""
        return self.resident_bytes / self.planned_bytes - 1 if self.planned_bytes else None


class TierResult(Frozen):
    """Weights outside of memory, over all batches that were measured."""

    stats: TierStats
    """Bytes by tier, and what was read since the model was loaded."""
    seconds: float
    """Of the same time."""
    predicted_step_seconds: float
    """For the batch that the placement was made for."""
    disk_bytes_per_second: float
    """What the disk reads without a model, measured in the same run; 0: no disk is used."""
    link_bytes_per_second: float = 0.0
    """Beside a GPU: what its kernels read of host memory, and..."""
    cpu_bytes_per_second: float = 0.0
    """...what the CPU's do, each beside the other, measured in the same run."""
    placement: str = ""

    @property
    def read_share(self) -> float:
        """Share of the disk's limit while reads were in flight."""
        reached = self.stats.read_bytes_per_second
        return reached / self.disk_bytes_per_second if reached and self.disk_bytes_per_second else 0.0


class BenchReport(Frozen):
    model: str
    parameters: int
    scheme: str
    kv: str
    device: str
    machine: str
    num_threads: int
    limits: MachineLimits
    start_seconds: float
    """From process start to ready for the first request, including imports and loading."""
    runs: tuple[BatchResult, ...]
    memory: MemoryUse
    split: SplitResult | None = None
    tiers: TierResult | None = None
    """None: all weights are in memory."""
    random_weights: bool = False
    made_at: str = ""
    windlass: str = ""
    version: int = REPORT_VERSION


class ReportChange(Frozen):
    what: str
    old: float
    new: float
    more_is_better: bool

    @property
    def ratio(self) -> float:
        """New over old where more is better, old over new otherwise: above 1 is an improvement either way."""
        better, worse = (self.new, self.old) if self.more_is_better else (self.old, self.new)
        return better / worse if worse else float("inf")


def encode_report(report: BenchReport) -> bytes:
    """JSON with achieved rates and their share of the limits added."""
    values: dict[str, Any] = msgspec.to_builtins(report)
    for run, shown in zip(report.runs, values["runs"], strict=True):
        shown["reached"] = {
            "read_bytes_per_second": run.read_bytes_per_second,
            "read_share": run.read_share(report.limits),
            "decode_flops_per_second": run.decode_flops_per_second,
            "decode_flops_share": run.decode_flops_share(report.limits),
            "prefill_flops_per_second": run.prefill_flops_per_second,
            "prefill_flops_share": run.prefill_flops_share(report.limits),
            "memory_limit_tokens_per_second": run.memory_limit_tokens_per_second(report.limits),
        }
    values["memory"]["over_plan"] = report.memory.over_plan
    return msgspec.json.format(msgspec.json.encode(values), indent=1)


def read_report(text: bytes, where: str) -> BenchReport:
    try:
        found = msgspec.convert(_without_derived(msgspec.json.decode(text, type=dict[str, Any])), BenchReport)
    except (TypeError, *DECODE_ERRORS) as error:
        raise BadInput(f"{where} is not a report of `windlass bench --save`: {error}") from None
    if found.version != REPORT_VERSION:
        raise BadInput(
            f"{where} has version {found.version}; this Windlass reads version {REPORT_VERSION}: run the benchmark again"
        )
    return found


def _without_derived(values: dict[str, Any]) -> dict[str, Any]:
    """Removes the fields that `encode_report` adds."""
    for run in cast(list[Any], values.get("runs") or []):
        if isinstance(run, dict):
            cast(dict[str, Any], run).pop("reached", None)
    if isinstance(values.get("memory"), dict):
        values["memory"].pop("over_plan", None)
    return values


def compare(new: BenchReport, old: BenchReport) -> tuple[ReportChange, ...]:
    """Compares runs of the same batch and lengths."""
    return tuple(_changes(new, old))


def _changes(new: BenchReport, old: BenchReport) -> Iterator[ReportChange]:
    before = {(run.batch, run.prompt_tokens, run.new_tokens): run for run in old.runs}
    for run in new.runs:
        found = before.get((run.batch, run.prompt_tokens, run.new_tokens))
        if found is None:
            continue
        name = f"batch {run.batch}: "
        yield _change(name + "decode tokens/s", found.decode_tokens_per_second, run.decode_tokens_per_second)
        yield _change(name + "prefill tokens/s", found.prefill_tokens_per_second, run.prefill_tokens_per_second)
        yield _change(
            name + "time to first token, s",
            found.time_to_first_token_seconds,
            run.time_to_first_token_seconds,
            more_is_better=False,
        )
    yield _change("memory, bytes", old.memory.resident_bytes, new.memory.resident_bytes, more_is_better=False)
    yield _change("startup, s", old.start_seconds, new.start_seconds, more_is_better=False)
    yield _change("memory bandwidth, bytes/s", old.limits.read_bytes_per_second, new.limits.read_bytes_per_second)


def _change(what: str, old: float, new: float, more_is_better: bool = True) -> ReportChange:
    return ReportChange(what=what, old=old, new=new, more_is_better=more_is_better)
