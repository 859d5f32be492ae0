"""Verdicts on a machine's limits: cores, memory, /dev/shm, files, clock, packages, environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from windlass.runtime.machine.fabric.variables import wrong_variables
from windlass.runtime.machine.health.host import HostFacts
from windlass.tasks.check.needs import Needs
from windlass.tasks.check.report import Check, failed, passed, warned
from windlass.units import GIB, MIB, format_bytes, format_seconds

LOCKED_BYTES = 16 * GIB
"""RDMA pins its buffers (AWS's health check warns below)."""
LITTLE_SHM_BYTES = 32 * MIB
"""Docker's default is 64 MiB."""
OPEN_FILES = 4096
SKEW_SECONDS = 0.05
"""node-mixin's alert."""
FAR_SKEW_SECONDS = 60.0
"""Certificates, logs and file times go wrong."""
SET_CLOCK = "set it with chrony or systemd-timesyncd; certificates, file times and logs go wrong meanwhile"
LEAST_FILE_BYTES = 64 * GIB
"""Weights and checkpoints are files of gigabytes."""
SWAP_SHARE = 0.25
VECTORS = ({"avx2", "fma"}, {"asimd"})


def judge_host(facts: HostFacts, needs: Needs, *, has_rdma: bool = False) -> list[Check]:
    host = facts.host
    return [
        _cpu(facts, host),
        _ram(facts, needs, host),
        *_swap(facts, host),
        _shm(facts, needs, host),
        *_limits(facts, needs, has_rdma, host),
        *_packages(facts, needs, host),
        _environment(facts, host),
        _names(facts, host),
        _clock(facts, host),
    ]


def _cpu(facts: HostFacts, host: str) -> Check:
    numa = f", {facts.num_numa_nodes} NUMA nodes" if facts.num_numa_nodes > 1 else ""
    shown = f"{facts.num_cores} cores of {facts.num_machine_cpus} CPUs{numa}; {', '.join(facts.instructions) or 'no vector instructions known'}"
    if not any(wanted <= set(facts.instructions) for wanted in VECTORS):
        return warned(
            "cpu",
            shown,
            "AVX2 with FMA, or NEON",
            "CPU kernels fall back to PyTorch and are slow; in a virtual machine pass the host's CPU through",
            host,
        )
    if facts.quota_cores is not None and facts.quota_cores < 1:
        return warned(
            "cpu",
            f"{facts.quota_cores:.2g} of a core, by a quota",
            "1 core",
            "everything takes many times as long: raise the quota (`docker run --cpus`, cpu.max of the control group, CPUQuota of the service)",
            host,
        )
    return passed("cpu", shown, host=host)


def _ram(facts: HostFacts, needs: Needs, host: str) -> Check:
    shown = f"{format_bytes(facts.ram_free_bytes)} free of {format_bytes(facts.ram_total_bytes)}"
    if facts.ram_free_bytes < needs.ram_bytes:
        return failed(
            "ram",
            shown,
            format_bytes(needs.ram_bytes),
            "end other programs, ask the scheduler for more memory, or plan with less",
            host,
        )
    return passed("ram", shown, format_bytes(needs.ram_bytes) if needs.ram_bytes else "", host)


def _swap(facts: HostFacts, host: str) -> Iterator[Check]:
    if facts.swap_total_bytes and facts.swap_used_bytes > SWAP_SHARE * facts.swap_total_bytes:
        yield warned(
            "swap",
            f"{format_bytes(facts.swap_used_bytes)} in use",
            "little",
            "memory is short; weights that are swapped out make every step slow",
            host,
        )


def _shm(facts: HostFacts, needs: Needs, host: str) -> Check:
    """Ranks of one machine share memory there; one process alone needs little."""
    shown = f"{format_bytes(facts.shm_free_bytes)} free of {format_bytes(facts.shm_total_bytes)}"
    remedy = "remove old files there, or start the container with --shm-size=8g or --ipc=host"
    if facts.shm_free_bytes < needs.shm_bytes:
        return failed("/dev/shm", shown, format_bytes(needs.shm_bytes), remedy, host)
    if facts.shm_free_bytes < LITTLE_SHM_BYTES:
        return warned("/dev/shm", shown, format_bytes(LITTLE_SHM_BYTES), remedy, host)
    return passed("/dev/shm", shown, format_bytes(needs.shm_bytes) if needs.shm_bytes else "", host)


def _limits(facts: HostFacts, needs: Needs, has_rdma: bool, host: str) -> Iterator[Check]:
    locked = facts.max_locked_bytes
    if has_rdma and locked is not None and locked < LOCKED_BYTES:
        yield warned(
            "locked memory",
            format_bytes(locked),
            format_bytes(LOCKED_BYTES),
            "InfiniBand pins its buffers: `ulimit -l unlimited`, or LimitMEMLOCK in the service",
            host,
        )
    else:
        yield passed("locked memory", "unlimited" if locked is None else format_bytes(locked), host=host)
    if facts.max_open_files < OPEN_FILES // 4 or (needs.num_machines > 1 and facts.max_open_files < OPEN_FILES):
        yield warned("open files", f"{facts.max_open_files:,}", f"{OPEN_FILES:,}", "`ulimit -n 65536` before starting", host)
    else:
        yield passed("open files", f"{facts.max_open_files:,}", host=host)

    if facts.max_file_bytes is not None and facts.max_file_bytes < max(LEAST_FILE_BYTES, needs.disk_bytes):
        remedy = "`ulimit -f unlimited`, or LimitFSIZE in the service: a larger file ends the program that writes it"
        yield warned("file size", f"{format_bytes(facts.max_file_bytes)} at most", "no limit", remedy, host)


def _names(facts: HostFacts, host: str) -> Check:
    if facts.name_problem:
        remedy = "downloads, and other machines by name, will fail: mend /etc/resolv.conf, or put the names into /etc/hosts"
        return warned("names", facts.name_problem, "names are found", remedy, host)
    return passed("names", "this machine's name is found, and name servers answer if there are any", host=host)


def _clock(facts: HostFacts, host: str) -> Check:
    """Machines are compared with each other by `--hosts`; one alone has its files and its board."""
    board = facts.board_clock_ahead_seconds
    if facts.clock_behind_seconds > FAR_SKEW_SECONDS:
        shown = f"{format_seconds(facts.clock_behind_seconds)} behind files of this machine, or more"
        return failed("clock", shown, "not behind what was written before", SET_CLOCK, host)
    if board is not None and abs(board) > FAR_SKEW_SECONDS and not facts.is_synchronized:
        shown = f"{format_seconds(abs(board))} {'behind' if board > 0 else 'ahead of'} the board's clock"
        return warned("clock", shown, f"within {format_seconds(FAR_SKEW_SECONDS)}", SET_CLOCK, host)
    kept = {True: "kept right by NTP or PTP", False: "nothing keeps it right that the kernel knows of"}
    known = kept.get(facts.is_synchronized, "unknown whether something keeps it right")  # type: ignore[arg-type]
    return passed("clock", f"{known}; not behind its files; `--hosts` compares machines", host=host)


def _packages(facts: HostFacts, needs: Needs, host: str) -> Iterator[Check]:
    missing = [name for name in needs.packages if name not in facts.packages]
    shown = ", ".join(f"{name} {facts.packages[name]}" for name in ("windlass", "torch") if name in facts.packages)
    if missing:
        yield failed(
            "packages", f"without {', '.join(missing)}", ", ".join(needs.packages), f"pip install {' '.join(missing)}", host
        )
    else:
        yield passed("packages", f"Python {facts.python}, {shown}" if shown else f"Python {facts.python}", host=host)


def _environment(facts: HostFacts, host: str) -> Check:
    wrong = wrong_variables(facts.environment)
    if not wrong:
        return passed("environment", f"{len(facts.environment)} variables of NCCL, PyTorch and CUDA", host=host)
    shown = ", ".join(f"{one.name}={facts.environment[one.name]}" for one in wrong)
    return warned("environment", shown, "names that exist", "; ".join(f"{one.name}: {one.why}" for one in wrong), host)


# --- several machines


def judge_alike(hosts: Sequence[HostFacts], skews: Mapping[str, float]) -> list[Check]:
    """What must be the same everywhere. That a virtual machine knows nothing of NTP is no fault: clocks are compared.

    `skews`: seconds by which each clock is ahead of ours."""
    rows = list(_skew(skews))
    for name in ("windlass", "torch"):
        found = {facts.host: facts.packages.get(name, "none") for facts in hosts}
        usual = _most_common(found.values())
        rows += [
            failed(
                "same versions",
                f"{name} {version}",
                f"{name} {usual}, as elsewhere",
                "install the same version on all machines",
                host,
            )
            for host, version in found.items()
            if version != usual
        ]
    if not any(row.name == "same versions" for row in rows):
        rows.append(passed("same versions", f"Windlass and torch on {len(hosts)} machines"))
    return rows


def _most_common(values: object) -> str:
    from collections import Counter

    return Counter(values).most_common(1)[0][0]  # type: ignore[arg-type]


def _skew(skews: Mapping[str, float]) -> Iterator[Check]:
    for host, skew in skews.items():
        if abs(skew) <= SKEW_SECONDS:
            continue
        judge = failed if abs(skew) > FAR_SKEW_SECONDS else warned
        shown = f"{format_seconds(abs(skew))} {'ahead' if skew > 0 else 'behind'}"
        yield judge("clock", shown, f"within {format_seconds(SKEW_SECONDS)}", "start chrony or systemd-timesyncd there", host)
    if skews and all(abs(skew) <= SKEW_SECONDS for skew in skews.values()):
        yield passed("clock", f"within {format_seconds(max(map(abs, skews.values())))} of each other")
