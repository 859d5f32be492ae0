"""Facts of machines that are well, to be made ill one at a time."""

from __future__ import annotations

from typing import Any

import msgspec

from windlass.runtime.machine.fabric.fabric import Fabric, HcaPort, Interface
from windlass.runtime.machine.health.gpus import GpuHealth, GpuReport
from windlass.runtime.machine.health.host import HostFacts
from windlass.tasks.check.machine.facts import MachineFacts
from windlass.tasks.check.machine.gpus import GpuFacts

GIB = 2**30
GPU = GpuHealth(
    index=0, name="NVIDIA H100 80GB HBM3", uuid="GPU-1", total_bytes=80 * GIB, free_bytes=79 * GIB, uncorrected_errors=0, remap_pending=False,
    remap_failed=False, throttle_bits=0x1, clock_mhz=345, max_clock_mhz=1980, power_limit_watts=700.0, default_power_limit_watts=700.0,
    celsius=34, slowdown_celsius=90, link_width=16, max_link_width=16,
)  # fmt: skip
HOST = HostFacts(
    host="n1", kernel="6.1.0", python="3.11.7", cpu_model="EPYC", num_cores=64, num_machine_cpus=128, instructions=("avx2", "fma"),
    num_numa_nodes=2, ram_free_bytes=1900 * GIB, ram_total_bytes=2000 * GIB, swap_used_bytes=0, swap_total_bytes=8 * GIB,
    shm_free_bytes=900 * GIB, shm_total_bytes=1000 * GIB, max_locked_bytes=None, max_open_files=65536, load_per_cpu=0.1,
    epoch_seconds=1.0, packages={"windlass": "0.1.0", "torch": "2.13.0"}, environment={},
)  # fmt: skip
PORTS = tuple(
    HcaPort(device=f"mlx5_{number}", port=1, state="ACTIVE", link_layer="InfiniBand", gigabits=400.0) for number in range(8)
)
FABRIC = Fabric(ports=PORTS, interfaces=(Interface(name="eth0", address="10.0.0.1", mtu=9000),))


def gpus(**changes: Any) -> GpuFacts:
    """Eight, of which number 3 is changed."""
    well = [msgspec.structs.replace(GPU, index=index) for index in range(8)]
    well[3] = msgspec.structs.replace(well[3], **changes)
    return GpuFacts(report=GpuReport(driver="570.1", cuda="12.8", gpus=tuple(well)), torch_gpus=8, torch_cuda="12.8", xids=())


def host(**changes: Any) -> HostFacts:
    return msgspec.structs.replace(HOST, **changes)


def machine(**changes: Any) -> MachineFacts:
    return MachineFacts(host=host(**changes), gpus=gpus(), fabric=FABRIC)
