"""Verdicts on GPUs. Limits: NVIDIA's XID catalogue, Azure's and Meta's node health checks."""

from __future__ import annotations

from collections.abc import Iterator

from windlass.core.model import Frozen
from windlass.runtime.machine.health.gpus import SLOWDOWNS, GpuHealth, GpuReport
from windlass.runtime.machine.health.kernel_log import FATAL, Xid
from windlass.tasks.check.needs import Needs
from windlass.tasks.check.report import Check, failed, passed, warned
from windlass.units import MIB, format_bytes

LEFT_OVER_BYTES = 850 * MIB
"""A driver and a display hold less; more is a process that was left behind (facebookresearch/gcm)."""
HOT_CELSIUS = 84
"""Idle or not (facebookresearch/gcm)."""
POWER_SHARE = 0.95


class GpuFacts(Frozen):
    report: GpuReport = GpuReport()
    torch_gpus: int | None = None
    """As torch counts them; None: not asked."""
    torch_cuda: str = ""
    xids: tuple[Xid, ...] | None = None
    """None: the kernel's log may not be read."""


def judge_gpus(facts: GpuFacts, needs: Needs, host: str = "") -> list[Check]:
    report = facts.report
    if report.problem:
        lost = failed(
            "gpus", report.problem, f"{needs.num_gpus or 'all'} GPUs", "run nvidia-smi; reload the driver or reboot", host
        )
        return [lost, *([_xids(facts, host)] if facts.xids else [])]  # the kernel's log often says why
    if not report.gpus and not needs.num_gpus:
        return [passed("gpus", "none, none needed", host=host)]
    rows = [_count(facts, needs, host), *_versions(facts, host), _xids(facts, host)]
    rows += [row for gpu in report.gpus for row in _gpu(gpu, needs, host)]
    for name, what in (
        ("gpu memory", "free"),
        ("ecc", "no errors"),
        ("throttle", "no slowdown"),
        ("gpu clocks", "as they should be"),
    ):
        if report.gpus and not any(row.name == name for row in rows):
            rows.append(passed(name, _measured(name, report.gpus, what), host=host))
    return rows


def _measured(name: str, gpus: tuple[GpuHealth, ...], what: str) -> str:
    if name == "gpu memory":
        return f"{format_bytes(min(gpu.free_bytes for gpu in gpus))} {what} on each of {len(gpus)}"
    hottest = max((gpu.celsius or 0 for gpu in gpus), default=0)
    return f"{what}{f', at most {hottest} C' if name == 'throttle' and hottest else ''}"


def _count(facts: GpuFacts, needs: Needs, host: str) -> Check:
    seen, by_torch = len(facts.report.gpus), facts.torch_gpus
    shown = f"{seen} by NVML{'' if by_torch is None else f', {by_torch} by torch'}"
    if seen < needs.num_gpus:
        return failed(
            "gpus",
            shown,
            f"{needs.num_gpus}",
            "a GPU is gone (look for XID 79) or not given to this job; check CUDA_VISIBLE_DEVICES",
            host,
        )
    if by_torch is not None and by_torch < min(seen, needs.num_gpus or seen):
        return failed(
            "gpus",
            shown,
            f"{needs.num_gpus or seen} by torch",
            "torch has no CUDA, or not one for this driver; install the CUDA build",
            host,
        )
    return passed("gpus", shown, str(needs.num_gpus or ""), host)


def _versions(facts: GpuFacts, host: str) -> Iterator[Check]:
    """A driver runs every CUDA up to its own; within a major version also newer minor ones."""
    driver, wanted = facts.report.cuda, facts.torch_cuda
    if not driver or not wanted:
        return
    shown = f"driver {facts.report.driver} runs CUDA {driver}; torch has {wanted}"
    if int(driver.split(".")[0]) < int(wanted.split(".")[0]):
        yield failed(
            "driver", shown, f"a driver for CUDA {wanted}", "update the driver, or install torch for an older CUDA", host
        )
    else:
        yield passed("driver", shown, host=host)


def _xids(facts: GpuFacts, host: str) -> Check:
    if facts.xids is None:
        return passed("xid", "the kernel's log may not be read by this user", host=host)
    if not facts.xids:
        return passed("xid", "none in the kernel's log", host=host)
    shown = ", ".join(f"XID {one.number} of {one.device}" for one in facts.xids[:4])
    remedy = "; ".join(dict.fromkeys(one.action for one in facts.xids))
    judge = failed if any(one.number in FATAL for one in facts.xids) else warned
    return judge("xid", shown, "none", remedy, host)


def _gpu(gpu: GpuHealth, needs: Needs, host: str) -> Iterator[Check]:
    """Only what is wrong."""
    yield from _memory(gpu, needs, host)
    if gpu.remap_failed or gpu.uncorrected_errors:
        shown = f"GPU {gpu.index}: {gpu.uncorrected_errors or 0} uncorrected errors{', row remapping failed' if gpu.remap_failed else ''}"
        yield failed("ecc", shown, "none", "replace the GPU" if gpu.remap_failed else "reset the GPU, and watch it", host)
    elif gpu.remap_pending:
        yield warned("ecc", f"GPU {gpu.index}: rows wait to be remapped", "none", "reset the GPU before a long run", host)
    reasons = [name for bit, name in SLOWDOWNS.items() if gpu.throttle_bits & bit]
    hot = gpu.celsius is not None and gpu.celsius >= min(HOT_CELSIUS, gpu.slowdown_celsius or HOT_CELSIUS)
    if reasons or hot:
        shown = f"GPU {gpu.index}: {', '.join([*reasons, *([f'{gpu.celsius} C'] if hot else [])])}"
        yield warned(
            "throttle", shown, f"below {HOT_CELSIUS} C, no slowdown", "look at cooling and power supply of this machine", host
        )
    yield from _clocks(gpu, host)


def _memory(gpu: GpuHealth, needs: Needs, host: str) -> Iterator[Check]:
    held = ", ".join(f"{one.name} (pid {one.pid}) {format_bytes(one.used_bytes)}" for one in gpu.processes[:3])
    shown = f"GPU {gpu.index}: {format_bytes(gpu.free_bytes)} free of {format_bytes(gpu.total_bytes)}{f', held by {held}' if held else ''}"
    used = gpu.total_bytes - gpu.free_bytes
    if gpu.free_bytes < needs.gpu_bytes:
        yield failed(
            "gpu memory", shown, format_bytes(needs.gpu_bytes), "end what holds it, or plan with less (--quant, --context)", host
        )
    elif used > LEFT_OVER_BYTES and gpu.processes and not needs.gpu_bytes:
        yield warned("gpu memory", shown, "free", "end what holds it", host)


def _clocks(gpu: GpuHealth, host: str) -> Iterator[Check]:
    limit, usual = gpu.power_limit_watts, gpu.default_power_limit_watts
    if limit is not None and usual and limit < POWER_SHARE * usual:
        shown = f"GPU {gpu.index}: limited to {limit:.0f} W of {usual:.0f} W"
        yield warned("gpu clocks", shown, "the default limit", f"nvidia-smi -i {gpu.index} -pl {usual:.0f}", host)
    if gpu.link_width and gpu.max_link_width and gpu.link_width < gpu.max_link_width:
        shown = f"GPU {gpu.index}: PCIe x{gpu.link_width} of x{gpu.max_link_width}"
        yield warned("gpu clocks", shown, "full width", "reseat the card; some cards also narrow the link while idle", host)
