"""How many CPUs of each node a job on Slurm asks for when nobody says: Slurm's own default is one a task.

All of a node, or of a node with GPUs as many as go with the GPUs that are asked for. Read from `scontrol`, whose `Name=value` format
is the same from 20.11 to 26.05.
"""

from __future__ import annotations

import re
from contextlib import suppress

from windlass.core.model import Frozen
from windlass.tasks.launch.drive.slurm import slurm_answer
from windlass.tasks.launch.drive.state import SchedulerFailed
from windlass.tasks.launch.job import Job, Settings


class SlurmNode(Frozen):
    cpus: int
    gpus: int = 0
    partitions: tuple[str, ...] = ()


class UsualCpus(Frozen):
    per_node: int | None
    """None: Slurm's default."""
    why: str


def usual_cpus(job: Job, settings: Settings) -> UsualCpus:
    """For a job without --cpus."""
    per_task = "CPUs: Slurm's default, as a rule 1 a task, since {}; --cpus N asks for N on each node"
    try:
        partitions, nodes = (
            slurm_answer(["scontrol", "show", "partition", "--oneliner"]),
            slurm_answer(["scontrol", "show", "node", "--oneliner"]),
        )
    except SchedulerFailed as error:
        return UsualCpus(per_node=None, why=per_task.format(str(error).partition(";")[0]))
    partition = chosen_partition(partitions, settings.partition)
    if partition is None:
        return UsualCpus(per_node=None, why=per_task.format("the partition is not known"))
    if job.gpus_per_node and "DefCpuPerGPU" in partition.get("JobDefaults", ""):
        return UsualCpus(
            per_node=None, why=f"CPUs: as the partition says ({partition['JobDefaults']}); --cpus N asks for N on each node"
        )
    fitting = [
        node for node in parse_nodes(nodes) if partition["PartitionName"] in node.partitions and node.gpus >= job.gpus_per_node
    ]
    if not fitting:
        return UsualCpus(per_node=None, why=per_task.format("no node of the partition has what is asked for"))
    found = min(_share(node, job.gpus_per_node) for node in fitting)
    limit = partition.get("MaxCPUsPerNode", "")
    found = min(found, int(limit)) if limit.isdecimal() and int(limit) else found
    with_gpus = any(node.gpus > job.gpus_per_node for node in fitting) and job.gpus_per_node
    what = f"as many as go with {job.gpus_per_node} GPUs" if with_gpus else "all of the smallest node of the partition"
    return UsualCpus(per_node=found, why=f"{found} CPUs on each node, {what}; --cpus N asks for N")


def _share(node: SlurmNode, num_gpus: int) -> int:
    return max(node.cpus * num_gpus // node.gpus, 1) if num_gpus else node.cpus


def fields_of(line: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S*)", line))


def chosen_partition(text: str, wanted: str) -> dict[str, str] | None:
    """The one that is named, of several the first; else the default."""
    every = [fields_of(line) for line in text.splitlines() if line.startswith("PartitionName=")]
    first = wanted.split(",")[0]
    return next((one for one in every if (one["PartitionName"] == first if first else one.get("Default") == "YES")), None)


def parse_nodes(text: str) -> list[SlurmNode]:
    """`CPUEfctv`: without those that the system keeps for itself (since 21.08)."""
    found: list[SlurmNode] = []
    for line in text.splitlines():
        fields = fields_of(line)
        with suppress(ValueError, KeyError):
            gpus = re.findall(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)", fields.get("Gres", ""))
            cpus = int(fields.get("CPUEfctv") or fields["CPUTot"])
            found.append(
                SlurmNode(cpus=cpus, gpus=sum(map(int, gpus)), partitions=tuple(fields.get("Partitions", "").split(",")))
            )
    return [node for node in found if node.cpus > 0]
