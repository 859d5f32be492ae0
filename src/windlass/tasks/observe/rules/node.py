"""Rules for machines: GPUs, memory, disks, energy.

Field names of DCGM before and after 4.6 are read once, in recording rules; alerts and dashboards read those.
"""

from __future__ import annotations

from windlass.core.metrics import node as m
from windlass.core.metrics.metric import Metric
from windlass.tasks.observe.rules.rule import BY, Alert, Group, Objectives, Recording

TEMPERATURE = "windlass:gpu_temperature:celsius"
POWER = "windlass:gpu_power:watts"
UTILIZATION = "windlass:gpu_utilization:ratio"
MEMORY = "windlass:gpu_memory_used:ratio"
XID = "windlass:gpu_xid:last"
REMAP_FAILED = "windlass:gpu_row_remap_failed:bool"
NODE_POWER = "windlass:node_power:watts"

APPLICATION_XIDS = "13|31|32|43|45|63|68|69|92|94|121"
"""Programs' own faults, or nothing to do but note it (NVIDIA's XID catalogue); every other code is the machine's."""
NO_READING_CELSIUS = 200.0
"""DCGM writes a huge number where a sensor has none."""
CAN_BE_FULL = 'fstype!~"overlay|squashfs|ramfs|devtmpfs|iso9660|fuse.*", mountpoint!~"/(run|sys|proc)(/.*)?"'
"""Those in memory too: what writes to /dev/shm or /tmp fails when they are full. How fast they fill says nothing."""
FILESYSTEMS = 'fstype!~"tmpfs|overlay|squashfs|ramfs|devtmpfs|iso9660|fuse.*"'


def node_groups(objectives: Objectives) -> tuple[Group, ...]:
    return (
        Group(name="windlass-gpu", recordings=_gpu_recordings(), alerts=_gpu(objectives)),
        Group(name="windlass-node", recordings=_node_recordings(), alerts=_node(objectives)),
    )


def either(metric: Metric) -> str:
    return f"{metric} or {m.RENAMED[metric.name]}"


def _gpu_recordings() -> tuple[Recording, ...]:
    return (
        Recording(name=TEMPERATURE, expr=f"({either(m.GPU_TEMP)}) < {NO_READING_CELSIUS:g}", help="GPU temperature."),
        Recording(name=POWER, expr=either(m.POWER_USAGE), help="GPU power."),
        Recording(
            name=UTILIZATION,
            expr=f"{m.GPU_UTIL} / 100 or {m.RENAMED[m.GPU_UTIL.name]}",
            help="Share of time with a kernel running; waiting for others counts as busy.",
        ),
        Recording(name=MEMORY, expr=f"{m.FB_USED} / ({m.FB_USED} + {m.FB_FREE})", help="Share of GPU memory in use."),
        Recording(name=XID, expr=either(m.XID_LAST), help="The last XID error."),
        Recording(name=REMAP_FAILED, expr=either(m.ROW_REMAP_FAILURE), help="1 if remapping of rows has failed."),
    )


def _xids(comparison: str) -> str:
    """A series that appears has no increase: what was not there ten minutes ago counts too."""
    chosen = f'{m.XIDS}{{xid{comparison}"{APPLICATION_XIDS}"}}'
    return f"increase({chosen}[10m]) > 0 or ({chosen} > 0 unless {chosen} offset 10m)"


def _gpu(objectives: Objectives) -> tuple[Alert, ...]:
    gpu = "{{ $labels.instance }} GPU {{ $labels.gpu }}"
    return (
        Alert(
            name="WindlassGpuHot",
            expr=f"{TEMPERATURE} > {objectives.gpu_celsius:g}",
            for_seconds=300,
            severity="page",
            summary=f"{gpu}: {{{{ $value }}}} C",
            action="Fans, air flow, its neighbours; it lowers its clocks by itself a few degrees later.",
        ),
        Alert(
            name="WindlassGpuThrottled",
            expr=f'increase({m.THROTTLED}{{reason=~"hw_slowdown|hw_thermal|hw_power_brake|sw_thermal"}}[10m]) > 60',
            for_seconds=0,
            severity="ticket",
            summary=f"{gpu}: clocks lowered by {{{{ $labels.reason }}}} for {{{{ $value | humanizeDuration }}}} of ten minutes",
            action="Heat or power supply. A power cap alone is no fault and does not count here.",
        ),
        Alert(
            name="WindlassGpuXid",
            expr=_xids("!~"),
            for_seconds=0,
            severity="page",
            summary=f"{gpu}: XID {{{{ $labels.xid }}}}",
            action="79 and 151 need a reboot, 46, 62, 64, 95, 109, 119, 120 a reset of the GPU; 48 and 74 a diagnosis.",
        ),
        Alert(
            name="WindlassGpuXidOfProgram",
            expr=_xids("=~"),
            for_seconds=0,
            severity="ticket",
            summary=f"{gpu}: XID {{{{ $labels.xid }}}}, usually a program's fault",
            action="Start the program again; if it comes back on this GPU alone, test the GPU.",
        ),
        Alert(
            name="WindlassGpuXidSeen",
            expr=f"changes({XID}[10m]) > 0 and {XID} > 0",
            for_seconds=0,
            severity="ticket",
            summary=f"{gpu}: the last XID changed (dcgm-exporter)",
            action="`dmesg` has the code and its text.",
        ),
        Alert(
            name="WindlassGpuMemoryErrors",
            expr=f"increase({m.ECC_UNCORRECTED}[1h]) > 0 or {REMAP_FAILED} == 1",
            for_seconds=0,
            severity="page",
            summary=f"{gpu}: uncorrectable memory errors",
            action="Take it out of use and reset it; if rows cannot be remapped it has to be replaced.",
        ),
        Alert(
            name="WindlassGpuMemoryFull",
            expr=f"{MEMORY} > 0.985",
            for_seconds=900,
            severity="ticket",
            summary=f"{gpu}: {{{{ $value | humanizePercentage }}}} of its memory is in use",
            action="The next allocation may fail. Another program? A lower --context or --max-running?",
        ),
    )


def _node_recordings() -> tuple[Recording, ...]:
    return (
        Recording(
            name=NODE_POWER, expr=f"sum by ({BY}) (rate({m.NODE_ENERGY}[5m]))", help="Power of a machine's GPUs and processors."
        ),
    )


def _full_in_4h(past: str) -> str:
    """node_exporter's own rule looks at six hours (and waits for one); a second, short look lets a burst that is over say nothing."""
    return f"predict_linear({m.FILESYSTEM_AVAIL}{{{FILESYSTEMS}}}[{past}], 14400) < 0"


def _node(objectives: Objectives) -> tuple[Alert, ...]:
    left = f"{m.FILESYSTEM_AVAIL}{{{FILESYSTEMS}}} / {m.FILESYSTEM_SIZE}{{{FILESYSTEMS}}}"
    return (
        Alert(
            name="WindlassNodeDown",
            expr='up{job="windlass-node"} == 0',
            for_seconds=60,
            severity="page",
            summary="{{ $labels.instance }} does not answer",
            action="Is the machine up? Is `windlass observe node` running there?",
        ),
        Alert(
            name="WindlassDiskFull",
            expr=f"{m.FILESYSTEM_AVAIL}{{{CAN_BE_FULL}}} / {m.FILESYSTEM_SIZE}{{{CAN_BE_FULL}}} < {objectives.disk_share_left:g}",
            for_seconds=120,
            severity="page",
            summary="{{ $labels.instance }} {{ $labels.mountpoint }}: {{ $value | humanizePercentage }} left",
            action="Checkpoints and logs cannot be written soon, or in /dev/shm and /tmp what ranks share. Free some.",
        ),
        Alert(
            name="WindlassDiskFilling",
            expr=f"{_full_in_4h('6h')} and {_full_in_4h('30m')} and {left} < 0.2 and {m.FILESYSTEM_AVAIL}{{{FILESYSTEMS}}} offset 30m > 0",
            for_seconds=1800,
            severity="ticket",
            summary="{{ $labels.instance }} {{ $labels.mountpoint }} will be full within four hours",
            action="Fewer checkpoints (checkpoint.keep), or a larger disk.",
        ),
        Alert(
            name="WindlassMemoryFull",
            expr=f"{m.MEMORY_AVAILABLE} / {m.MEMORY_TOTAL} < 0.05",
            for_seconds=300,
            severity="page",
            summary="{{ $labels.instance }}: {{ $value | humanizePercentage }} of memory left",
            action="The kernel will soon end a process, usually the largest.",
        ),
        Alert(
            name="WindlassEnergyBudget",
            expr=f"{NODE_POWER} > on ({BY}) ({m.ENERGY_BUDGET} > 0)",
            for_seconds=600,
            severity="ticket",
            summary="{{ $labels.instance }} uses {{ $value | humanize }} W, more than its budget",
            action="Lower the GPUs' power limit (nvidia-smi -pl), or raise the budget.",
        ),
        Alert(
            name="WindlassExporterFailing",
            expr=f"increase({m.EXPORTER_ERRORS}[10m]) > 5",
            for_seconds=0,
            severity="ticket",
            summary="{{ $labels.instance }}: the exporter cannot read {{ $labels.source }}",
            action="A driver that was updated while it ran, or no permission (RAPL needs root).",
        ),
    )
