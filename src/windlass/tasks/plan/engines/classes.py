"""Classes of devices that run alike: an engine's efficiencies are known per class, not per card."""

from __future__ import annotations

from windlass.core.hardware.spec import Device

_PREFIXES = {
    "hopper": ("H100", "H200", "H800", "H20", "GH200"),
    "blackwell": ("B200", "B300", "B100", "GB200", "GB300"),
    "ampere": ("A100", "A800"),
    "unified": ("DGX-SPARK", "GB10", "STRIX", "RYZEN-AI"),
    "rdna": ("RADEON", "RX-", "R9700", "W7900"),
}
_OF_KIND = {"metal": "metal", "cpu": "cpu", "rocm": "cdna"}


def device_class(device: Device) -> str:
    """`hopper`, `blackwell`, `ampere`, `consumer`, `unified`, `cdna`, `rdna`, `metal`, `cpu`, `cpu-avx512`, `cpu-amx` or `cpu-neon`."""
    name = device.name.upper()
    for found, prefixes in _PREFIXES.items():
        if name.startswith(prefixes):
            return found
    if device.kind == "cpu" and device.isa in ("avx512", "amx", "neon"):
        return f"cpu-{device.isa}"
    return _OF_KIND.get(device.kind, "consumer")
