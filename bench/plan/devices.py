"""The catalog of devices as Markdown. Run: python bench/plan/devices.py > docs/reference/devices.md"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from windlass.core.hardware.devices import FILES, Entry, catalog


def main() -> None:
    print("# Devices\n")
    print(
        f"What `--on` knows by name, from {', '.join(f'`core/hardware/{name}`' for name in FILES)}; `windlass devices` prints the same."
    )
    print(
        "TFLOP/s are peak and dense; *measured* is what large products reach, where somebody measured it. UNVERIFIED: from memory, not read at a"
    )
    print(
        "primary source. A device that is not here can be given by its figures: [plan-training.md](../guides/plan-training.md).\n"
    )
    print("| device | GiB | TB/s | bf16 | fp8 | measured bf16 | link GB/s | W | source |\n|---|---|---|---|---|---|---|---|---|")
    for name, found in catalog().items():
        print(f"| {name} | {' | '.join(_cells(found))} |")


def _cells(found: Entry) -> tuple[str, ...]:
    note = "; UNVERIFIED" if "UNVERIFIED" in found.note else ""
    return (
        f"{found.memory_mib / 1024:.1f}",
        f"{found.bandwidth_tb_per_s:.3g}",
        f"{found.tflops['bf16']:g}",
        f"{found.tflops['fp8']:g}" if "fp8" in found.tflops else "",
        f"{found.measured_tflops['bf16']:g}" if "bf16" in found.measured_tflops else "",
        f"{found.link_gb_per_s:g}" if found.link_gb_per_s else "",
        f"{found.watts:g}",
        found.source + note,
    )


if __name__ == "__main__":
    main()
