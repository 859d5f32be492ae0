"""Checkpoint size, save interval and goodput. Knows no step time."""

from __future__ import annotations

from math import sqrt
from typing import Literal

from windlass.core.hardware.spec import Hardware
from windlass.core.model import Frozen
from windlass.core.recipe.sections import CheckpointSection
from windlass.tasks.plan.training.job import TrainingJob
from windlass.tasks.plan.training.memory.states import MOMENTS

OBSERVED_HOURS_BETWEEN_FAILURES = 54 * 24 / 419
OBSERVED_DEVICES = 16_384
"""419 unexpected interruptions in 54 days on 16,384 H100s: one in 3.1 hours (arXiv 2407.21783, table 5)."""

STORE_BANDWIDTH = 2e12
"""What the store of those 16,384 devices sustains (7,500 storage servers; it peaks at 7 TB/s; arXiv 2407.21783, 3.3.1). A smaller
cluster is given the same per device, 122 MB/s; a single node writes to its own disk."""

SHORTEST_INTERVAL_SECONDS = 300.0
"""An assumption: Young and Daly count only the pause, which is milliseconds with asynchronous saves, and would save every few
seconds. But the store is shared, old checkpoints have to be deleted, and bursts saturate networks (same source)."""


class CheckpointPlan(Frozen):
    bytes: int
    pause_seconds: float
    """How long training pauses for one save."""
    write_seconds: float
    """Until it is written to the store."""
    write_bandwidth: float
    """Bytes per second, all ranks together."""
    interval_seconds: float
    young_daly_seconds: float
    """The interval if only the pause counted."""
    limited_by: Literal["recipe", "young_daly", "write", "floor"]
    mean_seconds_between_failures: float
    goodput: float
    """Fraction of the time spent on progress, after saving, lost work and restarts."""


def checkpoint_bytes(num_parameters: float, job: TrainingJob) -> int:
    """16-bit weights, their fp32 originals and the moments: 14 bytes a parameter with AdamW, as BLOOM's were (2.3 TiB of 176 G by
    `du`, which rounds up; its 16-bit weights alone 329 GiB)."""
    weights = 4 if job.compute == "fp32" else 2
    master = 0 if job.compute == "fp32" else 4
    return round(num_parameters * (weights + master + 4 * MOMENTS[job.optimizer]))


def mean_seconds_between_failures(num_devices: int) -> float:
    """The failure rate is proportional to the number of devices."""
    return OBSERVED_HOURS_BETWEEN_FAILURES * 3600 * OBSERVED_DEVICES / num_devices


def young_daly_seconds(pause_seconds: float, between_failures_seconds: float) -> float:
    """sqrt(2 delta M) (Young, CACM 17(9), 1974; Daly, FGCS 22(3), 2006)."""
    return sqrt(2 * pause_seconds * between_failures_seconds)


def store_bandwidth(hardware: Hardware) -> float:
    """Aggregate write bandwidth of all ranks, if the recipe does not set it."""
    if len(hardware.nodes) == 1:
        return hardware.nodes[0].disk_bandwidth
    return min(hardware.num_devices / OBSERVED_DEVICES, 1.0) * STORE_BANDWIDTH


def plan_checkpoints(num_bytes: int, hardware: Hardware, section: CheckpointSection | None = None) -> CheckpointPlan:
    """Every device copies its shard to host memory; writing it to the store is asynchronous, or blocks training."""
    section = section or CheckpointSection()
    devices, node = hardware.num_devices, hardware.nodes[0]
    copy = num_bytes / devices / (node.devices[0].host_bandwidth or node.ram_bandwidth)
    bandwidth = section.bandwidth or store_bandwidth(hardware)
    write = num_bytes / bandwidth
    pause = copy if section.asynchronous else copy + write
    failures = mean_seconds_between_failures(devices)
    ideal = young_daly_seconds(pause, failures)
    every, limited_by = _interval(section.interval_minutes, ideal, write)
    unsafe = write if section.asynchronous else 0.0  # a failure during a write falls back to the previous checkpoint
    return CheckpointPlan(
        bytes=num_bytes,
        pause_seconds=pause,
        write_seconds=write,
        write_bandwidth=bandwidth,
        interval_seconds=every,
        young_daly_seconds=ideal,
        limited_by=limited_by,
        mean_seconds_between_failures=failures,
        goodput=goodput(pause, every, failures, 60 * section.restart_minutes + unsafe),
    )


def _interval(
    minutes: float | None, ideal: float, write: float
) -> tuple[float, Literal["recipe", "young_daly", "write", "floor"]]:
    """Never shorter than a write: the next save would wait for it."""
    if minutes is not None:
        return (60 * minutes, "recipe") if 60 * minutes >= write else (write, "write")
    if ideal >= max(write, SHORTEST_INTERVAL_SECONDS):
        return ideal, "young_daly"
    return (write, "write") if write > SHORTEST_INTERVAL_SECONDS else (SHORTEST_INTERVAL_SECONDS, "floor")


def goodput(pause_seconds: float, interval_seconds: float, between_failures_seconds: float, restart_seconds: float) -> float:
    """First order: a failure loses half an interval and a restart (Daly 2006, eq. 13 without its higher terms)."""
    lost = pause_seconds / interval_seconds + (interval_seconds / 2 + restart_seconds) / between_failures_seconds
    return 1 / (1 + lost)
