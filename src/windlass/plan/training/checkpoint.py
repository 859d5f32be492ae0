"""How large a checkpoint is, how often to save, and how much of the time is left for training. Knows no step time."""

from __future__ import annotations

from math import sqrt

from windlass.core.hardware import Hardware
from windlass.core.model import Frozen
from windlass.plan.training.job import Job
from windlass.plan.training.states import MOMENTS

OBSERVED_HOURS_BETWEEN_FAILURES = 54 * 24 / 419
OBSERVED_DEVICES = 16_384
"""419 unexpected interruptions in 54 days on 16,384 H100s: one in 3.1 hours (arXiv 2407.21783, table 5)."""


class CheckpointPlan(Frozen):
    bytes: int
    pause_seconds: float
    """How long training stands still for one."""
    write_seconds: float
    """Until it is safe on disk."""
    interval_seconds: float
    mean_seconds_between_failures: float
    goodput: float
    """Share of the time that makes progress: saving, lost work and restarts taken off."""


def checkpoint_bytes(num_parameters: float, job: Job) -> int:
    """16-bit weights, their fp32 originals and the moments: 14 bytes a parameter with AdamW, as BLOOM's were (2.3 TiB of 176 G by
    `du`, which rounds up; its 16-bit weights alone 329 GiB)."""
    weights = 4 if job.compute == "fp32" else 2
    master = 0 if job.compute == "fp32" else 4
    return round(num_parameters * (weights + master + 4 * MOMENTS[job.optimizer]))


def mean_seconds_between_failures(num_devices: int) -> float:
    """Failures come from parts, so their rate grows with the number of parts."""
    return OBSERVED_HOURS_BETWEEN_FAILURES * 3600 * OBSERVED_DEVICES / num_devices


def young_daly_seconds(pause_seconds: float, between_failures_seconds: float) -> float:
    """sqrt(2 delta M) (Young, CACM 17(9), 1974; Daly, FGCS 22(3), 2006)."""
    return sqrt(2 * pause_seconds * between_failures_seconds)


def plan_checkpoints(
    num_bytes: int,
    hardware: Hardware,
    *,
    asynchronous: bool = True,
    interval_seconds: float | None = None,
    restart_seconds: float = 600.0,
) -> CheckpointPlan:
    """Every device copies its share to the host; nodes write theirs to disk beside the training, or before it goes on."""
    devices, node = len(hardware.devices), hardware.nodes[0]
    copy = num_bytes / devices / (node.devices[0].host_bandwidth or node.ram_bandwidth)
    write = num_bytes / len(hardware.nodes) / node.disk_bandwidth
    pause = copy if asynchronous else copy + write
    failures = mean_seconds_between_failures(devices)
    every = interval_seconds or max(young_daly_seconds(pause, failures), write)
    return CheckpointPlan(
        bytes=num_bytes,
        pause_seconds=pause,
        write_seconds=write,
        interval_seconds=every,
        mean_seconds_between_failures=failures,
        goodput=goodput(pause, every, failures, restart_seconds),
    )


def goodput(pause_seconds: float, interval_seconds: float, between_failures_seconds: float, restart_seconds: float) -> float:
    """First order: a failure loses half an interval and a restart (Daly 2006, eq. 13 without its higher terms)."""
    lost = pause_seconds / interval_seconds + (interval_seconds / 2 + restart_seconds) / between_failures_seconds
    return 1 / (1 + lost)
