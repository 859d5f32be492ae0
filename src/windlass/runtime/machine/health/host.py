"""Limits and versions of this machine: cores, memory, /dev/shm, open files, locked memory, clock, packages."""

from __future__ import annotations

import os
import resource
import shutil
import sys
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from windlass import __version__
from windlass.core.model import Frozen
from windlass.runtime.machine.cgroups import cpu_quotas
from windlass.runtime.machine.health.clock import board_ahead, clock_behind, is_synchronized
from windlass.runtime.machine.health.names import name_problem
from windlass.runtime.machine.proc import ReadText, field_bytes, read_text
from windlass.runtime.machine.system import this_system

PACKAGES = (
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "msgspec",
    "transformers",
    "triton",
    "vllm",
    "nvidia-nccl-cu12",
)
INSTRUCTIONS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimd", "sve", "i8mm")
UNLIMITED = resource.RLIM_INFINITY


class HostFacts(Frozen):
    host: str
    kernel: str
    python: str
    cpu_model: str
    num_cores: int
    num_machine_cpus: int
    """Logical CPUs of the machine; the cores above are what this process may use."""
    instructions: tuple[str, ...]
    num_numa_nodes: int
    ram_free_bytes: int
    ram_total_bytes: int
    swap_used_bytes: int
    swap_total_bytes: int
    shm_free_bytes: int
    shm_total_bytes: int
    max_locked_bytes: int | None
    """None: no limit."""
    max_open_files: int
    load_per_cpu: float
    epoch_seconds: float
    packages: dict[str, str]
    environment: dict[str, str]
    """Of NCCL, PyTorch, CUDA, gloo and MPI."""
    max_file_bytes: int | None = None
    """The largest file that this process may write (`ulimit -f`); None: no limit."""
    quota_cores: float | None = None
    """CPU time that its control groups allow; None: no limit."""
    name_problem: str = ""
    """Why names cannot be looked up."""
    clock_behind_seconds: float = 0.0
    """By how much the clock is behind files that were just there; 0: not that is known."""
    board_clock_ahead_seconds: float | None = None
    is_synchronized: bool | None = None
    """Whether the kernel's clock is disciplined (NTP, PTP); None: unknown."""


def read_host(read: ReadText = read_text) -> HostFacts:
    system, meminfo, cpuinfo = this_system(), read("/proc/meminfo"), read("/proc/cpuinfo")
    shm = _usage("/dev/shm")
    swap_total, swap_free = field_bytes(meminfo, "SwapTotal") or 0, field_bytes(meminfo, "SwapFree") or 0
    locked, files = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    size = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return HostFacts(
        host=os.uname().nodename,
        kernel=os.uname().release,
        python=sys.version.split()[0],
        cpu_model=system.cpu_model,
        num_cores=system.num_cores,
        num_machine_cpus=os.cpu_count() or 1,
        instructions=instruction_sets(cpuinfo),
        num_numa_nodes=len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1,
        ram_free_bytes=system.ram_bytes,
        ram_total_bytes=system.total_ram_bytes,
        swap_used_bytes=swap_total - swap_free,
        swap_total_bytes=swap_total,
        shm_free_bytes=shm[0],
        shm_total_bytes=shm[1],
        max_locked_bytes=None if locked == UNLIMITED else locked,
        max_open_files=2**31 if files == UNLIMITED else files,
        max_file_bytes=None if size == UNLIMITED else size,
        quota_cores=min(cpu_quotas(read), default=None),
        name_problem=name_problem(),
        clock_behind_seconds=clock_behind(time.time()),
        board_clock_ahead_seconds=board_ahead(time.time(), read),
        is_synchronized=is_synchronized(),
        load_per_cpu=os.getloadavg()[0] / (os.cpu_count() or 1),
        epoch_seconds=time.time(),
        packages=package_versions(),
        environment=collective_environment(dict(os.environ)),
    )


def instruction_sets(cpuinfo: str) -> tuple[str, ...]:
    flags = next((line for line in cpuinfo.splitlines() if line.startswith(("flags", "Features"))), "")
    words = set(flags.partition(":")[2].split())
    return tuple(name for name in INSTRUCTIONS if name in words)


def _usage(folder: str) -> tuple[int, int]:
    with suppress(OSError):
        usage = shutil.disk_usage(folder)
        return usage.free, usage.total
    return 0, 0


def package_versions() -> dict[str, str]:
    """Ours is named as it is imported; the distribution has another name."""
    found = {"windlass": __version__}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def collective_environment(given: dict[str, str]) -> dict[str, str]:
    prefixes = ("NCCL_", "TORCH_", "PYTORCH_", "CUDA_", "CUDNN_", "GLOO_", "TRANSFORMERS_", "DEEPSPEED_", "SLURM_LOCAL")
    return {name: value for name, value in given.items() if name.startswith(prefixes)}
