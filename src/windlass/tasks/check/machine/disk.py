"""Verdicts on disks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from windlass.core.model import Frozen
from windlass.runtime.machine.health.disk_check import DiskFacts
from windlass.tasks.check.machine.host import FAR_SKEW_SECONDS, SET_CLOCK
from windlass.tasks.check.needs import Needs
from windlass.tasks.check.report import Check, failed, passed, warned
from windlass.units import GIB, MB, MIB, format_bandwidth, format_bytes, format_seconds

SPARE_BYTES = 5 * GIB
"""Logs, caches and results of any run."""
FULL_BYTES = 16 * MIB
"""Nothing that is worth a run can be written any more."""
SLOW_WRITE = 50 * MB
SLOW_FSYNC_SECONDS = 0.5
FEW_INODES = 1000


class SharedFacts(Frozen):
    """What one machine sees of a folder that all should share."""

    host: str
    folder: str
    sees: tuple[str, ...]
    """Hosts whose mark it sees there."""
    write_bytes_per_second: float = 0.0
    """While all write at once."""
    problem: str = ""


def judge_disk(facts: DiskFacts, needs: Needs, host: str = "") -> list[Check]:
    return [_room(facts, needs, host), *_clock(facts, host), *_speed(facts, needs, host)]


def _clock(facts: DiskFacts, host: str) -> Iterator[Check]:
    """A file server has a clock of its own."""
    ahead = facts.clock_ahead_seconds
    if abs(ahead) > FAR_SKEW_SECONDS:
        shown = f"files in {facts.folder} are dated {format_seconds(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} this machine's clock"
        yield warned("clock", shown, f"within {format_seconds(FAR_SKEW_SECONDS)}", SET_CLOCK, host)


def _room(facts: DiskFacts, needs: Needs, host: str) -> Check:
    shown = f"{format_bytes(facts.free_bytes)} free in {facts.folder}"
    if facts.problem:
        return failed(
            "disk room",
            f"{facts.folder} cannot be written: {facts.problem}",
            "a folder to write to",
            "choose another folder, or its rights",
            host,
        )
    if facts.free_bytes < max(needs.disk_bytes, FULL_BYTES):
        return failed(
            "disk room", shown, format_bytes(max(needs.disk_bytes, FULL_BYTES)), "free some, or choose another folder", host
        )
    if facts.free_inodes is not None and facts.free_inodes < FEW_INODES:
        return failed(
            "disk room",
            f"{facts.free_inodes} files may still be created in {facts.folder}",
            f"{FEW_INODES}",
            "remove files",
            host,
        )
    if facts.free_bytes < SPARE_BYTES:
        return warned("disk room", shown, format_bytes(SPARE_BYTES), "logs and results will soon fill it; free some", host)
    return passed("disk room", shown, format_bytes(needs.disk_bytes) if needs.disk_bytes else "", host)


def _speed(facts: DiskFacts, needs: Needs, host: str) -> Iterator[Check]:
    if not facts.write_bytes_per_second:
        return
    shown = (
        f"reads {format_bandwidth(facts.read_bytes_per_second)}, writes {format_bandwidth(facts.write_bytes_per_second)}, "
        f"{facts.random_reads_per_second:,.0f} random reads/s in {facts.folder}"
    )
    short_read = facts.read_bytes_per_second < needs.disk_read_bytes_per_second
    short_write = facts.write_bytes_per_second < needs.disk_write_bytes_per_second
    wanted = ", ".join(
        f"{what} {format_bandwidth(rate)}"
        for what, rate in (("reads", needs.disk_read_bytes_per_second), ("writes", needs.disk_write_bytes_per_second))
        if rate
    )
    if short_read or short_write:
        yield warned("disk speed", shown, wanted, "use a local NVMe disk; the plan's speed is not reached with this one", host)
    elif facts.write_bytes_per_second < SLOW_WRITE or facts.fsync_seconds > SLOW_FSYNC_SECONDS:
        yield warned(
            "disk speed",
            f"{shown}; fsync {facts.fsync_seconds:.2f} s",
            f"writes {format_bandwidth(SLOW_WRITE)}",
            "checkpoints will take long here",
            host,
        )
    else:
        yield passed("disk speed", shown, wanted, host)
    if facts.renames is False:
        yield failed(
            "disk rename",
            f"a renamed file is not as it was written in {facts.folder}",
            "POSIX rename and fsync",
            "keep checkpoints elsewhere",
            host,
        )
    else:
        yield passed("disk rename", "rename and fsync behave", host=host)


def judge_shared(seen: Sequence[SharedFacts]) -> list[Check]:
    """Every machine must see the mark of every other."""
    every = {facts.host for facts in seen}
    rows: list[Check] = []
    for facts in seen:
        lacking = sorted(every - set(facts.sees))
        if facts.problem:
            rows.append(
                failed("shared storage", f"{facts.folder}: {facts.problem}", "writable everywhere", "mount it there", facts.host)
            )
        elif lacking:
            shown = f"does not see files of {len(lacking)} machines ({', '.join(lacking[:3])}) in {facts.folder}"
            rows.append(
                failed("shared storage", shown, "one folder for all", "mount the same storage on all machines", facts.host)
            )
    total = sum(facts.write_bytes_per_second for facts in seen)
    if not rows and seen:
        rows.append(
            passed("shared storage", f"{len(every)} machines see {seen[0].folder}; together they write {format_bandwidth(total)}")
        )
    return rows
