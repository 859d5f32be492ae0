"""Rules for machines: GPUs, memory, disks, energy.

Field names of DCGM before and after 4.6 are read once, in recording rules; alerts and dashboards read those.
"""

from __future__ import annotations

from typing import Literal

from windlass.core.metrics import node as m
from windlass.core.metrics.metric import Metric
from windlass.tasks.observe.conditions.condition import HOUR, MINUTE, Binary, Condition, Grouped, Where, latest, over
from windlass.tasks.observe.rules.rule import BY, Alert, Group, Objectives, Recording, page, ticket

TEMPERATURE = "windlass:gpu_temperature:celsius"
POWER = "windlass:gpu_power:watts"
UTILIZATION = "windlass:gpu_utilization:ratio"
MEMORY = "windlass:gpu_memory_used:ratio"
XID = "windlass:gpu_xid:last"
REMAP_FAILED = "windlass:gpu_row_remap_failed:bool"
NODE_POWER = "windlass:node_power:watts"

APPLICATION_XIDS = "13|31|32|43|45|63|68|69|92|94|121"
"""Programs' own faults, or nothing to do but note it (NVIDIA's XID catalogue); every other code is the machine's."""
TOO_HOT = "hw_slowdown|hw_thermal|hw_power_brake|sw_thermal"
NO_READING_CELSIUS = 200.0
"""DCGM writes a huge number where a sensor has none."""
CAN_BE_FULL = (
    Where("fstype", "!~", "overlay|squashfs|ramfs|devtmpfs|iso9660|fuse.*"),
    Where("mountpoint", "!~", "/(run|sys|proc)(/.*)?"),
)
"""Those in memory too: what writes to /dev/shm or /tmp fails when they are full. How fast they fill says nothing."""
ON_DISK = Where("fstype", "!~", "tmpfs|overlay|squashfs|ramfs|devtmpfs|iso9660|fuse.*")


def node_groups(objectives: Objectives) -> tuple[Group, ...]:
    return (
        Group("windlass-gpu", recordings=_gpu_recordings(), alerts=_gpu(objectives)),
        Group("windlass-node", recordings=_node_recordings(), alerts=_node(objectives)),
    )


def _either(metric: Metric) -> Condition:
    return latest(metric).or_else(latest(m.RENAMED[metric.name]))


def _gpu_recordings() -> tuple[Recording, ...]:
    utilization = (latest(m.GPU_UTIL) / 100).or_else(latest(m.RENAMED[m.GPU_UTIL.name]))
    memory = latest(m.FB_USED) / (latest(m.FB_USED) + latest(m.FB_FREE))
    return (
        Recording(TEMPERATURE, _either(m.GPU_TEMP) < NO_READING_CELSIUS, "GPU temperature."),
        Recording(POWER, _either(m.POWER_USAGE), "GPU power."),
        Recording(UTILIZATION, utilization, "Share of time with a kernel running; waiting for others counts as busy."),
        Recording(MEMORY, memory, "Share of GPU memory in use."),
        Recording(XID, _either(m.XID_LAST), "The last XID error."),
        Recording(REMAP_FAILED, _either(m.ROW_REMAP_FAILURE), "1 if remapping of rows has failed."),
    )


def _xids(op: Literal["=~", "!~"]) -> Condition:
    """A series that appears has no increase: what was not there ten minutes ago counts too."""
    chosen = Where("xid", op, APPLICATION_XIDS)
    is_new = (latest(m.XIDS, chosen) > 0).unless(latest(m.XIDS, chosen, ago=10 * MINUTE))
    return (over("increase", m.XIDS, 10 * MINUTE, chosen) > 0).or_else(is_new)


def _gpu(objectives: Objectives) -> tuple[Alert, ...]:
    gpu = "{{ $labels.instance }} GPU {{ $labels.gpu }}"
    return (
        page(
            "WindlassGpuHot",
            (latest(TEMPERATURE) > objectives.gpu_celsius).lasting(300),
            gpu + ": {{ $value }} C",
            "Fans, air flow, its neighbours; it lowers its clocks by itself a few degrees later.",
        ),
        ticket(
            "WindlassGpuThrottled",
            over("increase", m.THROTTLED, 10 * MINUTE, Where("reason", "=~", TOO_HOT)) > 60,
            gpu + ": clocks lowered by {{ $labels.reason }} for {{ $value | humanizeDuration }} of ten minutes",
            "Heat or power supply. A power cap alone is no fault and does not count here.",
        ),
        page(
            "WindlassGpuXid",
            _xids("!~"),
            gpu + ": XID {{ $labels.xid }}",
            "79 and 151 need a reboot, 46, 62, 64, 95, 109, 119, 120 a reset of the GPU; 48 and 74 a diagnosis.",
        ),
        ticket(
            "WindlassGpuXidOfProgram",
            _xids("=~"),
            gpu + ": XID {{ $labels.xid }}, usually a program's fault",
            "Start the program again; if it comes back on this GPU alone, test the GPU.",
        ),
        ticket(
            "WindlassGpuXidSeen",
            (over("changes", XID, 10 * MINUTE) > 0).also(latest(XID) > 0),
            gpu + ": the last XID changed (dcgm-exporter)",
            "`dmesg` has the code and its text.",
        ),
        page(
            "WindlassGpuMemoryErrors",
            (over("increase", m.ECC_UNCORRECTED, HOUR) > 0).or_else(latest(REMAP_FAILED).equals(1)),
            gpu + ": uncorrectable memory errors",
            "Take it out of use and reset it; if rows cannot be remapped it has to be replaced.",
        ),
        ticket(
            "WindlassGpuMemoryFull",
            (latest(MEMORY) > 0.985).lasting(900),
            gpu + ": {{ $value | humanizePercentage }} of its memory is in use",
            "The next allocation may fail. Another program? A lower --context or --max-running?",
        ),
    )


def _node_recordings() -> tuple[Recording, ...]:
    power = Grouped("sum", over("rate", m.NODE_ENERGY, 5 * MINUTE), BY)
    return (Recording(NODE_POWER, power, "Power of a machine's GPUs and processors."),)


def _filling() -> Condition:
    """node_exporter's own rule looks at six hours (and waits for one); a second, short look lets a burst that is over say nothing."""
    left = latest(m.FILESYSTEM_AVAIL, ON_DISK) / latest(m.FILESYSTEM_SIZE, ON_DISK)
    long, short = (
        over("predict_linear", m.FILESYSTEM_AVAIL, past, ON_DISK, parameter=4 * HOUR) < 0 for past in (6 * HOUR, 30 * MINUTE)
    )
    had_room = latest(m.FILESYSTEM_AVAIL, ON_DISK, ago=30 * MINUTE) > 0
    return long.also(short).also(left < 0.2).also(had_room)


def _node(objectives: Objectives) -> tuple[Alert, ...]:
    left = latest(m.FILESYSTEM_AVAIL, *CAN_BE_FULL) / latest(m.FILESYSTEM_SIZE, *CAN_BE_FULL)
    return (
        page(
            "WindlassNodeDown",
            latest("up", Where("job", "=", "windlass-node")).equals(0).lasting(60),
            "{{ $labels.instance }} does not answer",
            "Is the machine up? Is `windlass observe node` running there?",
        ),
        page(
            "WindlassDiskFull",
            (left < objectives.disk_share_left).lasting(120),
            "{{ $labels.instance }} {{ $labels.mountpoint }}: {{ $value | humanizePercentage }} left",
            "Checkpoints and logs cannot be written soon, or in /dev/shm and /tmp what ranks share. Free some.",
        ),
        ticket(
            "WindlassDiskFilling",
            _filling().lasting(1800),
            "{{ $labels.instance }} {{ $labels.mountpoint }} will be full within four hours",
            "Fewer checkpoints (checkpoint.keep), or a larger disk.",
        ),
        page(
            "WindlassMemoryFull",
            (latest(m.MEMORY_AVAILABLE) / latest(m.MEMORY_TOTAL) < 0.05).lasting(300),
            "{{ $labels.instance }}: {{ $value | humanizePercentage }} of memory left",
            "The kernel will soon end a process, usually the largest.",
        ),
        ticket(
            "WindlassEnergyBudget",
            Binary(latest(NODE_POWER), ">", latest(m.ENERGY_BUDGET) > 0, on=BY).lasting(600),
            "{{ $labels.instance }} uses {{ $value | humanize }} W, more than its budget",
            "Lower the GPUs' power limit (nvidia-smi -pl), or raise the budget.",
        ),
        ticket(
            "WindlassExporterFailing",
            over("increase", m.EXPORTER_ERRORS, 10 * MINUTE) > 5,
            "{{ $labels.instance }}: the exporter cannot read {{ $labels.source }}",
            "A driver that was updated while it ran, or no permission (RAPL needs root).",
        ),
    )
