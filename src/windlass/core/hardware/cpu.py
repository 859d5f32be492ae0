"""The CPUs of one node as one device, estimated from the number of cores. Measures nothing (`machine.bandwidth` does)."""

from __future__ import annotations

from functools import lru_cache

from windlass.core.hardware.spec import Device
from windlass.units import GB

PEAK_FLOPS_PER_CORE = 96e9
"""fp32 with AVX2: 2 FMA units x 8 lanes x 2 operations x about 3 GHz. NEON (4 units x 4 lanes) comes to the same."""

MATMUL_FRACTION = 0.6
"""Fraction of that peak that a good matmul reaches on all cores (clocks drop, memory is shared)."""

STREAM_FRACTION = 0.8
"""Read bandwidth over the memory's specification; STREAM on servers gives 0.75 to 0.85."""

RAM_BYTES_PER_CORE = 4 * GB
"""Default without `ram=`: the 4 GB per vCPU of the clouds' general-purpose machines (AWS m, GCP n2-standard, Azure D)."""

WATTS_PER_CORE = 4.0
"""An EPYC 9654 is sold at 360 W for 96 cores."""


def default_ram_bytes(num_cores: int) -> int:
    return num_cores * RAM_BYTES_PER_CORE


def default_bandwidth(num_cores: int) -> float:
    """Estimated read bandwidth in bytes per second, replaced by `channels=`, `bw=` or a probe: that of the usual memory channels, which a
    few cores cannot use up. One core draws about 15 GB/s (measured: two threads of an EPYC read 30 GB/s)."""
    return min(15e9 * num_cores, channel_bandwidth(usual_channels(num_cores)))


USUAL_CHANNELS = ((16, 2), (32, 4), (64, 8), (128, 12))
"""Most cores, and memory channels of such machines: desktops 2, workstations 4, servers with Xeon 8, with EPYC 12 (EPYC 9654: 96 cores)."""


def usual_channels(num_cores: int) -> int:
    """Two sockets beyond the largest."""
    return next((channels for cores, channels in USUAL_CHANNELS if num_cores <= cores), 24)


DESKTOP_TRANSFERS, SERVER_TRANSFERS = 5600, 4800
"""Million transfers per second of DDR5, if not said: desktops have one or two channels, servers four and more."""


def channel_bandwidth(channels: int, transfers: int | None = None) -> float:
    """Bytes per second that `channels` memory channels of 64 bits read."""
    each = transfers or (DESKTOP_TRANSFERS if channels <= 2 else SERVER_TRANSFERS)
    return STREAM_FRACTION * channels * 8 * each * 1e6


@lru_cache(maxsize=64)
def cpu_device(
    num_cores: int, memory_bytes: int, read_bandwidth: float | None = None, source: str = "estimated from the number of cores"
) -> Device:
    """`read_bandwidth`: measured bytes per second, if known."""
    reads = default_bandwidth(num_cores) if read_bandwidth is None else read_bandwidth
    peak = num_cores * PEAK_FLOPS_PER_CORE
    return Device(
        name=f"cpu:{num_cores}",
        kind="cpu",
        memory_bytes=memory_bytes,
        bandwidth=reads / STREAM_FRACTION,
        measured_bandwidth=reads,
        flops={"fp32": peak, "bf16": peak},  # without AMX, bf16 is converted and multiplied in fp32
        measured_flops={"fp32": peak * MATMUL_FRACTION, "bf16": peak * MATMUL_FRACTION},
        host_bandwidth=reads,
        watts=num_cores * WATTS_PER_CORE,
        source=source,
    )
