"""AMD GPUs through amdsmi, under the same names, as far as it has them. Written to its documentation; run against a stand-in only."""

from __future__ import annotations

from typing import Any

from windlass.core.metrics import node as m
from windlass.tasks.observe.node.readings import Readings


def load_amd() -> Any | None:
    try:
        import amdsmi  # type: ignore[import-not-found]

        library: Any = amdsmi
        library.amdsmi_init()
    except Exception:  # noqa: BLE001 - not installed, or no driver
        return None
    return library


class AmdGpus:
    def __init__(self, library: Any) -> None:
        self._library = library
        self._handles = list(library.amdsmi_get_processor_handles())
        self._values: list[dict[str, float]] = [{} for _ in self._handles]
        self.num_errors = 0

    def __len__(self) -> int:
        return len(self._handles)

    def sample(self, seconds: float) -> None:
        for index, handle in enumerate(self._handles):
            try:
                self._values[index] = self._read(handle)
            except Exception:  # noqa: BLE001 - the library has exceptions of its own
                self.num_errors += 1

    def _read(self, handle: Any) -> dict[str, float]:
        library = self._library
        memory = library.amdsmi_get_gpu_vram_usage(handle)
        energy = library.amdsmi_get_energy_count(handle)
        return {
            m.GPU_UTIL.name: library.amdsmi_get_gpu_activity(handle)["gfx_activity"],
            m.FB_USED.name: memory["vram_used"],
            m.FB_FREE.name: memory["vram_total"] - memory["vram_used"],
            m.GPU_TEMP.name: library.amdsmi_get_temp_metric(
                handle, library.AmdSmiTemperatureType.HOTSPOT, library.AmdSmiTemperatureMetric.CURRENT
            ),
            m.POWER_USAGE.name: library.amdsmi_get_power_info(handle)["average_socket_power"],
            m.ENERGY.name: energy["energy_accumulator"] * energy["counter_resolution"] / 1000,  # microjoules
        }

    def add_to(self, found: Readings) -> None:
        for metric in (m.GPU_UTIL, m.FB_USED, m.FB_FREE, m.GPU_TEMP, m.POWER_USAGE, m.ENERGY):
            for index, values in enumerate(self._values):
                found.add(metric, values.get(metric.name), {"gpu": str(index), "UUID": f"amd-{index}", "modelName": "AMD"})

    def joules(self) -> float | None:
        found = [values.get(m.ENERGY.name) for values in self._values]
        known = [value for value in found if value is not None]
        return sum(known) / 1000 if known and len(known) == len(found) else None
