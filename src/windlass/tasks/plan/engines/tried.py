"""Which paths of the embedded engine run today. What is planned beyond them is said so, and is never the recommendation. Pure."""

from __future__ import annotations

from collections.abc import Collection

from windlass.core.hardware.spec import Device
from windlass.tasks.plan.engines.classes import device_class

_NAMES = {
    "ampere": "A100-class GPUs",
    "blackwell": "Blackwell GPUs",
    "consumer": "GPUs other than Hopper",
    "unified": "GPUs other than Hopper",
    "metal": "Apple GPUs (there is no Metal backend)",
    "cdna": "AMD GPUs",
    "rdna": "AMD GPUs",
}


def not_run_yet(devices: Collection[Device], num_devices: int, *, offloads: bool, to_disk: bool, has_kernels: bool) -> str:
    """Why a plan for the embedded engine cannot be relied on; empty if this path was run.

    Run: CPUs, alone and in groups; one Hopper GPU; weights in host memory beside one Hopper GPU, in 4 bits; experts on disk below that, 14 layers of
    GLM-4.5-Air (docs/reference/offload.md).
    """
    accelerators = [device for device in devices if device.kind != "cpu"]
    if not accelerators:
        return ""
    strange = [device for device in accelerators if device_class(device) != "hopper"]
    if strange:
        return f"Windlass was never run on {_NAMES.get(device_class(strange[0]), strange[0].name)}"
    if num_devices > 1:
        return "Windlass runs on one GPU so far: splitting over several was never run"
    if (offloads or to_disk) and not has_kernels:
        return "beside a GPU, Windlass offloads only 4-bit weights of models that its Hopper kernels support"
    return ""
