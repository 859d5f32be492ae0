"""CPUs of a job on Slurm that names none."""

from __future__ import annotations

import pytest

from windlass.tasks.launch.drive import cpus
from windlass.tasks.launch.drive.state import SchedulerFailed
from windlass.tasks.launch.job import Job, Settings

pytestmark = pytest.mark.pure

PARTITIONS = """PartitionName=batch AllowGroups=ALL Default=YES MaxCPUsPerNode=UNLIMITED JobDefaults=(null)
PartitionName=gpu AllowGroups=ALL Default=NO MaxCPUsPerNode=UNLIMITED JobDefaults=(null)
PartitionName=half AllowGroups=ALL Default=NO MaxCPUsPerNode=12 JobDefaults=(null)
PartitionName=site AllowGroups=ALL Default=NO MaxCPUsPerNode=UNLIMITED JobDefaults=DefCpuPerGPU=8
"""
NODES = """NodeName=c1 Arch=x86_64 CPUAlloc=0 CPUEfctv=30 CPUTot=32 Gres=(null) Partitions=batch,half
NodeName=c2 Arch=x86_64 CPUAlloc=0 CPUTot=64 Gres=(null) Partitions=batch
NodeName=g1 Arch=x86_64 CPUAlloc=0 CPUEfctv=96 CPUTot=96 Gres=gpu:h100:8(S:0-1) Partitions=gpu,site
NodeName=g2 Arch=x86_64 CPUAlloc=0 CPUEfctv=128 CPUTot=128 Gres=gpu:a100:4,gpu:h100:4,nvme:1 Partitions=gpu,site
"""


@pytest.mark.parametrize(
    ("partition", "gpus", "number", "says"),
    [
        ("", 0, 30, "all of the smallest node"),
        ("half", 0, 12, "all of"),
        ("gpu", 8, 96, "all of"),
        ("gpu", 2, 24, "go with 2 GPUs"),
        ("gpu,batch", 2, 24, "go with 2 GPUs"),
        ("site", 2, None, "DefCpuPerGPU=8"),
        ("", 1, None, "no node of the partition"),
        ("none", 0, None, "the partition is not known"),
    ],
)
def test_what_is_asked_for(monkeypatch: pytest.MonkeyPatch, partition: str, gpus: int, number: int | None, says: str) -> None:
    monkeypatch.setattr(cpus, "slurm_answer", lambda argv: PARTITIONS if "partition" in argv else NODES)
    settings = Settings(scheduler="slurm", folder="/f", workdir="/w", python="python3", partition=partition)
    found = cpus.usual_cpus(Job(name="j", command=("bench", "tiny-glm"), gpus_per_node=gpus), settings)
    assert found.per_node == number and says in found.why and "--cpus N" in found.why


def test_where_slurm_does_not_answer_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(argv: list[str]) -> str:
        raise SchedulerFailed("scontrol is not installed here; run this on a login node of the cluster")

    monkeypatch.setattr(cpus, "slurm_answer", refuse)
    settings = Settings(scheduler="slurm", folder="/f", workdir="/w", python="python3")
    found = cpus.usual_cpus(Job(name="j", command=("bench", "tiny-glm")), settings)
    assert found.per_node is None and "1 a task, since scontrol is not installed here" in found.why
