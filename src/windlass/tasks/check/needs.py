"""What a run needs of each machine. Zero or empty: nothing is known, and nothing is asked."""

from __future__ import annotations

from windlass.core.model import Frozen
from windlass.core.plan import Plan


class Needs(Frozen):
    num_gpus: int = 0
    """On each machine."""
    gpu_bytes: int = 0
    """Free on each GPU."""
    ram_bytes: int = 0
    disk_bytes: int = 0
    """In the folder of checkpoints, results or offloaded weights."""
    disk_read_bytes_per_second: float = 0.0
    disk_write_bytes_per_second: float = 0.0
    shm_bytes: int = 0
    num_machines: int = 1
    uses_collectives: bool = False
    network_bytes_per_second: float = 0.0
    packages: tuple[str, ...] = ()


MIB = 2**20
SHM_PER_RANK_BYTES = 64 * MIB
"""NCCL's and gloo's buffers between two ranks of a machine are of this order."""


def needs_of_plan(plan: Plan, disk_read: float = 0.0) -> Needs:
    """Of an inference or a training plan, for its fullest machine."""
    on_gpus = not all(held.name.startswith("cpu") for held in plan.memory.per_device)
    num_machines = len({rank.node for rank in plan.ranks}) or 1
    per_machine = -(-plan.layout.world // num_machines)
    fullest = max(held.total_bytes for held in plan.memory.per_device)
    checkpoint = (plan.train or {}).get("checkpoint", {})
    return Needs(
        num_gpus=per_machine if on_gpus else 0,
        gpu_bytes=fullest if on_gpus else 0,
        ram_bytes=plan.memory.host_bytes // num_machines if on_gpus else fullest * per_machine,
        disk_bytes=plan.memory.disk_bytes + int(checkpoint.get("bytes", 0)),
        disk_read_bytes_per_second=disk_read,
        shm_bytes=SHM_PER_RANK_BYTES * per_machine if per_machine > 1 else 0,
        num_machines=num_machines,
        uses_collectives=plan.layout.world > 1 or plan.train is not None,
    )
