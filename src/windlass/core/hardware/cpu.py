"""The CPUs of one node as one device, estimated from the number of cores. Measures nothing (`machine.bandwidth` does)."""

from __future__ import annotations

from functools import lru_cache

from windlass.core.hardware.spec import Device
from windlass.units import GB

PEAK_FLOPS_PER_CORE = 96e9
"""fp32 with AVX2: 2 FMA units x 8 lanes x 2 operations x about 3 GHz. NEON (4 units x 4 lanes) comes to the same."""

MATMUL_FRACTION = 0.6
"""Fraction of that peak that a good matmul reaches on all cores (clocks drop, memory is shared)."""

ISA_FACTOR = {"": 1.0, "avx2": 1.0, "neon": 1.0, "avx512": 1.6, "amx": 4.0}
"""Products over AVX2's, as engines reach them: AVX-512 has twice the lanes at lower clocks; AMX multiplies tiles (KTransformers: 21 TFLOP/s a
socket in bf16, of which prompts see a fifth)."""

STREAM_FRACTION = 0.8
"""Read bandwidth over the memory's specification; STREAM on servers gives 0.75 to 0.85."""

RAM_BYTES_PER_CORE = 4 * GB
"""Default without `ram=`: the 4 GB per vCPU of the clouds' general-purpose machines (AWS m, GCP n2-standard, Azure D)."""

WATTS_PER_CORE = 4.0
"""An EPYC 9654 is sold at 360 W for 96 cores."""


def default_ram_bytes(num_cores: int) -> int:
    return num_cores * RAM_BYTES_PER_CORE


def default_channels(num_cores: int) -> int:
    """Memory channels of a machine of which only the cores are known: 2 in desktops, 4 in workstations, 8 and 12 in servers of one socket.

    A second socket is not assumed: 128 and 192 cores are sold in one (EPYC 9754, AmpereOne), and engines gain little from two (tasks/plan/engines).
    """
    return next((channels for most, channels in ((16, 2), (32, 4), (96, 8)) if num_cores <= most), 12)


def default_bandwidth(num_cores: int) -> float:
    """Estimated read bandwidth in bytes per second, replaced by `bw=` or a probe.

    One core draws about 15 GB/s (measured: two threads of an EPYC read 30 GB/s), and no more than the channels give.
    """
    return min(15e9 * num_cores, channel_bandwidth(default_channels(num_cores)))


def num_cores(device: Device) -> int:
    """Of a CPU; 0 of an accelerator."""
    return int(device.name.rpartition(":")[2]) if device.kind == "cpu" else 0


DESKTOP_TRANSFERS, SERVER_TRANSFERS = 5600, 4800
"""Million transfers per second of DDR5, if not said: desktops have one or two channels, servers four and more."""


def channel_bandwidth(channels: int, transfers: int | None = None) -> float:
    """Bytes per second that `channels` memory channels of 64 bits read."""
    each = transfers or (DESKTOP_TRANSFERS if channels <= 2 else SERVER_TRANSFERS)
    return STREAM_FRACTION * channels * 8 * each * 1e6


@lru_cache(maxsize=64)
def cpu_device(
    num_cores: int,
    memory_bytes: int,
    read_bandwidth: float | None = None,
    source: str = "estimated from the number of cores",
    isa: str = "",
) -> Device:
    """`read_bandwidth`: measured bytes per second, if known."""
    reads = default_bandwidth(num_cores) if read_bandwidth is None else read_bandwidth
    peak = num_cores * PEAK_FLOPS_PER_CORE
    wide = peak * ISA_FACTOR[isa]
    return Device(
        name=f"cpu:{num_cores}",
        kind="cpu",
        memory_bytes=memory_bytes,
        bandwidth=reads / STREAM_FRACTION,
        measured_bandwidth=reads,
        flops={"fp32": peak, "bf16": wide},  # without AMX, bf16 is converted and multiplied in fp32
        measured_flops={"fp32": peak * MATMUL_FRACTION, "bf16": wide * MATMUL_FRACTION},
        host_bandwidth=reads,
        watts=num_cores * WATTS_PER_CORE,
        source=source,
        isa=isa,
    )
