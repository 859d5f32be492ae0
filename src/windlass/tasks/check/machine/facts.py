"""Everything that is read of one machine, as one value that travels as JSON."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import msgspec

from windlass.core.model import Frozen
from windlass.runtime.machine.fabric.fabric import Fabric, read_fabric
from windlass.runtime.machine.health.gpus import this_machines_gpu_health
from windlass.runtime.machine.health.host import HostFacts, read_host
from windlass.runtime.machine.health.kernel_log import kernel_log, parse_xids
from windlass.tasks.check.machine.gpus import GpuFacts, judge_gpus
from windlass.tasks.check.machine.host import judge_host
from windlass.tasks.check.needs import Needs
from windlass.tasks.check.report import Check


class MachineFacts(Frozen):
    host: HostFacts
    gpus: GpuFacts = GpuFacts()
    fabric: Fabric = Fabric()


def read_machine(full: bool = False) -> MachineFacts:
    """`full`: also what torch says, which takes seconds to import."""
    report = this_machines_gpu_health()
    torch_gpus, torch_cuda = _torch() if full and report.gpus and find_spec("torch") else (None, "")
    log = kernel_log() if report.gpus or report.problem else ""
    xids = None if log is None else parse_xids(log)
    return MachineFacts(
        host=read_host(),
        gpus=GpuFacts(report=report, torch_gpus=torch_gpus, torch_cuda=torch_cuda, xids=xids),
        fabric=read_fabric(),
    )


def _torch() -> tuple[int | None, str]:
    """GPUs as torch counts them, and its CUDA; asked in another process, since importing torch takes seconds and a CUDA context memory."""
    program = "import torch; print(torch.cuda.device_count(), torch.version.cuda or '')"
    try:
        done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return None, ""
    words = done.stdout.split()
    return (int(words[0]), words[1] if len(words) > 1 else "") if done.returncode == 0 and words else (None, "")


def judge_machine(facts: MachineFacts, needs: Needs, host: str = "") -> list[Check]:
    """`host`: its name in the report; without one, the machine's own."""
    named = facts.host if not host else msgspec.structs.replace(facts.host, host=host)
    return [*judge_gpus(facts.gpus, needs, named.host), *judge_host(named, needs, has_rdma=bool(facts.fabric.active_ports))]
