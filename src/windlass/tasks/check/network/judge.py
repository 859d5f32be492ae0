"""Verdicts on the network between machines, and on those that are slower than the rest. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from windlass.core.model import Frozen
from windlass.runtime.machine.fabric.fabric import Fabric
from windlass.tasks.check.report import Check, failed, passed, warned
from windlass.units import format_bandwidth, format_bytes, format_seconds

STRAGGLER = 0.75
"""A machine below this share of the best is slow (NVIDIA's resiliency extension)."""
SLOW_LINK = 0.5
"""Of the usual pair's bandwidth."""
SLOW_TRIP_SECONDS = 2e-3
"""Within one building it is 20 to 200 us; beyond this, collectives of every layer wait."""
EXPECTED_SHARE = 0.6
"""Of a link's rate that TCP or a ring should reach."""

# Bus bandwidth of a large all-reduce in GB/s that operators ask for (Azure/azurehpc-health-checks), by GPU and number in a machine.
BUS_GBYTES = {("H100", 8): 460.0, ("H200", 8): 431.0, ("A100", 8): 228.0, ("H100 NVL", 2): 208.0, ("MI300X", 8): 314.0}


class Reached(Frozen):
    """One attempt to reach a port."""

    source: str
    target: str
    port: int
    seconds: float | None = None
    problem: str = ""


class Measured(Frozen):
    source: str
    target: str
    bytes_per_second: float


def judge_reach(tried: Sequence[Reached]) -> list[Check]:
    """Firewalls are named by port; machines that nothing reaches by name."""
    rows: list[Check] = []
    bad: dict[tuple[str, int, str], list[str]] = {}
    for one in tried:
        if one.seconds is None:
            bad.setdefault((one.target, one.port, one.problem), []).append(one.source)
    for (target, port, problem), sources in bad.items():
        everyone = len(sources) == len({one.source for one in tried if one.target == target})
        shown = f"port {port} of {target} is not reached from {'anywhere' if everyone else ', '.join(sources[:3])}: {problem}"
        rows.append(
            failed(
                "ports",
                shown,
                "open between all machines",
                f"open TCP port {port} on {target} (nft list ruleset, security groups)",
                target,
            )
        )
    trips = [one.seconds for one in tried if one.seconds is not None]
    if tried and not rows:
        rows.append(passed("ports", f"{len(tried)} connections between {len({one.source for one in tried})} machines"))
    if trips:
        slow = [one for one in tried if one.seconds is not None and one.seconds > SLOW_TRIP_SECONDS]
        shown = f"{format_seconds(median(trips))} round trip, at most {format_seconds(max(trips))}"
        if slow:
            names = ", ".join(dict.fromkeys(f"{one.source} to {one.target}" for one in slow[:3]))
            rows.append(
                warned(
                    "latency",
                    f"{shown} ({names})",
                    f"below {format_seconds(SLOW_TRIP_SECONDS)}",
                    "machines of one run should stand in one place",
                )
            )
        else:
            rows.append(passed("latency", shown))
    return rows


def judge_bandwidth(found: Sequence[Measured], needed: float = 0.0) -> list[Check]:
    """Pairs against the usual pair first, tables second. A machine that is slow with all is named."""
    if not found:
        return []
    usual = median(one.bytes_per_second for one in found)
    slow = [one for one in found if one.bytes_per_second < SLOW_LINK * usual]
    shown = f"{format_bandwidth(usual)} ({8 * usual / 1e9:.1f} Gb/s) between two machines"
    if slow:
        names = ", ".join(f"{one.source} to {one.target} {format_bandwidth(one.bytes_per_second)}" for one in slow[:3])
        guilty = _in_all([{one.source, one.target} for one in slow])
        remedy = f"look at the cable, port and driver of {guilty or 'these machines'}"
        return [
            warned("bandwidth", f"{names}; usual are {format_bandwidth(usual)}", "at least half of the usual", remedy, guilty)
        ]
    if usual < needed:
        return [
            warned(
                "bandwidth",
                shown,
                format_bandwidth(needed),
                "the plan counts on a faster network; plan with what there is (@ in --on)",
            )
        ]
    return [passed("bandwidth", shown, format_bandwidth(needed) if needed else "")]


def _in_all(pairs: Sequence[set[str]]) -> str:
    """The one machine that all slow pairs have."""
    common = [name for name in pairs[0] if all(name in pair for pair in pairs)] if pairs else []
    return common[0] if len(common) == 1 else ""


def judge_all_reduce(
    found: Mapping[int, float], gpu: str, num_gpus: int, num_machines: int, link_bytes: float = 0.0
) -> list[Check]:
    """Bus bandwidth by size. One machine: the table above; several: the link's rate."""
    if not found:
        return []
    largest = max(found)
    shown = ", ".join(f"{format_bytes(size)} {format_bandwidth(rate)}" for size, rate in sorted(found.items()))
    known = next((rate for (name, number), rate in BUS_GBYTES.items() if name in gpu and number == num_gpus), 0.0)
    expected = known * 1e9 if num_machines == 1 else EXPECTED_SHARE * link_bytes
    if expected and found[largest] < 0.95 * expected * (1.0 if num_machines > 1 else 0.8 if largest < 2**32 else 1.0):
        return [
            warned(
                "all-reduce",
                shown,
                format_bandwidth(expected),
                "NCCL_DEBUG=INFO shows the transport; look for a missing NIC, NVLink or GPU-direct",
            )
        ]
    return [passed("all-reduce", shown, format_bandwidth(expected) if expected else "")]


def judge_work(found: Mapping[str, Mapping[str, float]]) -> list[Check]:
    """The same matmul and copy everywhere: the outlier is named."""
    rows: list[Check] = []
    for name, unit in (("matmul_tflops", "TFLOP/s"), ("copy_gbytes", "GB/s")):
        rates = {host: rate[name] for host, rate in found.items()}
        usual = median(rates.values()) if rates else 0.0
        for host, rate in rates.items():
            if rate < STRAGGLER * usual:
                shown = f"{name.split('_')[0]} at {rate:.3g} {unit}, others {usual:.3g}"
                rows.append(
                    warned(
                        "stragglers",
                        shown,
                        f"{STRAGGLER:.0%} of the others",
                        "look for throttling, another job or a power limit; leave it out of long runs",
                        host,
                    )
                )
    if found and not rows:
        usual = median(rate["matmul_tflops"] for rate in found.values())
        rows.append(passed("stragglers", f"{len(found)} machines alike, {usual:.3g} TFLOP/s"))
    return rows


def judge_fabric(fabrics: Mapping[str, Fabric]) -> list[Check]:
    """InfiniBand ports that are down where others have them up, and unlike MTUs."""
    rows: list[Check] = []
    most = max((len(fabric.active_ports) for fabric in fabrics.values()), default=0)
    for host, fabric in fabrics.items():
        down = [f"{port.device}:{port.port} {port.state}" for port in fabric.ports if not port.is_active]
        if len(fabric.active_ports) < most:
            shown = f"{len(fabric.active_ports)} of {most} ports active{f' ({chr(44).join(down[:4])})' if down else ''}"
            rows.append(failed("infiniband", shown, f"{most}, as elsewhere", "ibstat; look at cable and subnet manager", host))
    if most and not rows:
        rate = max(port.gigabits for fabric in fabrics.values() for port in fabric.active_ports)
        rows.append(passed("infiniband", f"{most} active ports a machine, {rate:g} Gb/s"))
    return rows + _mtu(fabrics)


def _mtu(fabrics: Mapping[str, Fabric]) -> list[Check]:
    """Of interfaces of the same name."""
    rows: list[Check] = []
    names = {one.name for fabric in fabrics.values() for one in fabric.interfaces}
    for name in sorted(names):
        found = {host: one.mtu for host, fabric in fabrics.items() for one in fabric.interfaces if one.name == name and one.mtu}
        if len(set(found.values())) > 1:
            usual = sorted(found.values())[len(found) // 2]
            odd = {host: mtu for host, mtu in found.items() if mtu != usual}
            rows += [
                warned(
                    "mtu",
                    f"{name} has {mtu}",
                    f"{usual}, as elsewhere",
                    "large packets are lost between unlike MTUs; set the same",
                    host,
                )
                for host, mtu in odd.items()
            ]
    if fabrics and not rows and len(fabrics) > 1:
        rows.append(passed("mtu", "the same everywhere"))
    return rows
