"""Metrics of a machine: GPUs under DCGM's field names, the host under node_exporter's, energy.

The units are those of the original names (MiB, MHz, mJ), not Prometheus' base units: a dashboard made for dcgm-exporter reads them.
DCGM 4.6 renamed its fields; `RENAMED` has the new name of each, and recording rules read both (`windlass.tasks.observe`).
"""

from __future__ import annotations

from windlass.core.metrics.metric import counter, gauge

GPU_LABELS = ("gpu", "UUID", "modelName")

GPU_UTIL = gauge("DCGM_FI_DEV_GPU_UTIL", "Time with a kernel running (%).", *GPU_LABELS)
MEM_COPY_UTIL = gauge("DCGM_FI_DEV_MEM_COPY_UTIL", "Time with memory being read or written (%).", *GPU_LABELS)
FB_USED = gauge("DCGM_FI_DEV_FB_USED", "Memory in use (MiB).", *GPU_LABELS)
FB_FREE = gauge("DCGM_FI_DEV_FB_FREE", "Free memory (MiB).", *GPU_LABELS)
GPU_TEMP = gauge("DCGM_FI_DEV_GPU_TEMP", "GPU temperature (C).", *GPU_LABELS)
MEMORY_TEMP = gauge("DCGM_FI_DEV_MEMORY_TEMP", "Memory temperature (C).", *GPU_LABELS)
POWER_USAGE = gauge("DCGM_FI_DEV_POWER_USAGE", "Power (W).", *GPU_LABELS)
ENERGY = counter("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "Energy since the driver was loaded (mJ).", *GPU_LABELS)
SM_CLOCK = gauge("DCGM_FI_DEV_SM_CLOCK", "SM clock (MHz).", *GPU_LABELS)
MEM_CLOCK = gauge("DCGM_FI_DEV_MEM_CLOCK", "Memory clock (MHz).", *GPU_LABELS)
THROTTLE_REASONS = gauge("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", "Bits of the reasons for lower clocks (nvml.h).", *GPU_LABELS)
ECC_CORRECTED = counter("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", "Corrected memory errors since the driver was loaded.", *GPU_LABELS)
ECC_UNCORRECTED = counter("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "Uncorrected memory errors since the driver was loaded.", *GPU_LABELS)
ROW_REMAP_FAILURE = gauge("DCGM_FI_DEV_ROW_REMAP_FAILURE", "1 if remapping of memory rows has failed.", *GPU_LABELS)
XID_LAST = gauge("DCGM_FI_DEV_XID_ERRORS", "The last XID error; 0: none since the exporter began.", *GPU_LABELS)
NVLINK_BYTES = counter("DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", "NVLink bytes, both directions, all links.", *GPU_LABELS)
PCIE_TX = gauge("DCGM_FI_DEV_PCIE_TX_THROUGHPUT", "PCIe bytes sent, over 20 ms (KB/s).", *GPU_LABELS)
PCIE_RX = gauge("DCGM_FI_DEV_PCIE_RX_THROUGHPUT", "PCIe bytes received, over 20 ms (KB/s).", *GPU_LABELS)
PCIE_REPLAYS = counter("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "PCIe retransmissions.", *GPU_LABELS)

XIDS = counter("windlass_gpu_xid_errors_total", "XID errors since the exporter began, by code.", "gpu", "xid")
THROTTLED = counter(
    "windlass_gpu_throttled_seconds_total",
    "Time with clocks lowered, by reason, as sampled since the exporter began.",
    "gpu",
    "reason",
)
GPU_POWER_LIMIT = gauge("windlass_gpu_power_limit_watts", "Power limit of the GPU.", "gpu")

RENAMED = {
    GPU_UTIL.name: "DCGM_FI_DEV_GPU_UTIL_RATIO",
    GPU_TEMP.name: "DCGM_FI_DEV_GPU_TEMP_CELSIUS",
    POWER_USAGE.name: "DCGM_FI_DEV_BOARD_POWER_WATTS",
    XID_LAST.name: "DCGM_FI_DEV_XID_ERROR",
    PCIE_REPLAYS.name: "DCGM_FI_DEV_PCIE_REPLAY_TOTAL",
    ROW_REMAP_FAILURE.name: "DCGM_FI_DEV_ROW_REMAP_FAILED",
    NVLINK_BYTES.name: "DCGM_FI_DEV_NVLINK_THROUGHPUT_TOTAL",
}
"""Old name -> the name from DCGM 4.6 on (NVIDIA/DCGM, dcgm_fields.h)."""

# --- the host, as node_exporter names it

CPU_SECONDS = counter("node_cpu_seconds_total", "Time of all processors by mode.", "cpu", "mode")
LOAD = gauge("node_load1", "Load average of a minute.")
MEMORY_TOTAL = gauge("node_memory_MemTotal_bytes", "Memory.")
MEMORY_AVAILABLE = gauge("node_memory_MemAvailable_bytes", "Memory that can still be allocated.")
FILESYSTEM_SIZE = gauge("node_filesystem_size_bytes", "Size of a filesystem.", "device", "fstype", "mountpoint")
FILESYSTEM_AVAIL = gauge("node_filesystem_avail_bytes", "Free space of a filesystem.", "device", "fstype", "mountpoint")
DISK_READ = counter("node_disk_read_bytes_total", "Bytes read from a disk.", "device")
DISK_WRITTEN = counter("node_disk_written_bytes_total", "Bytes written to a disk.", "device")
NETWORK_RECEIVED = counter("node_network_receive_bytes_total", "Bytes received on an interface.", "device")
NETWORK_SENT = counter("node_network_transmit_bytes_total", "Bytes sent on an interface.", "device")
NODE_TIME = gauge("node_time_seconds", "The machine's clock.")

# --- energy

NODE_ENERGY = counter("windlass_node_energy_joules_total", "Energy of this machine by counter (nvml, rapl).", "source")
SERVED_ENERGY = counter(
    "windlass_energy_joules_total",
    "Energy while serving, by what it was used for: requests, idle, loading. The three add up to the counter.",
    "use",
)
REQUEST_ENERGY = counter("windlass_model_energy_joules_total", "Energy attributed to the requests of a model.", "model")
GRID_INTENSITY = gauge("windlass_grid_intensity_grams_per_kwh", "CO2 equivalent of the grid: average, location-based.", "region")
ENERGY_BUDGET = gauge("windlass_energy_budget_watts", "Power that the operator allows; 0: no budget.")

EXPORTER_SECONDS = counter("windlass_exporter_seconds_total", "CPU time of the exporter itself.")
EXPORTER_ERRORS = counter("windlass_exporter_errors_total", "Readings that failed, by source.", "source")
