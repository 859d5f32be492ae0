"""Costs of the embedded engine's own kernels for 4-bit weights on Hopper GPUs, measured on one H200 (docs/reference/cuda-notes.md)."""

from __future__ import annotations

from windlass.core.model import Frozen


class KernelTimes(Frozen):
    """Kernel overhead beyond bytes / bandwidth and FLOPs / matmul rate. Seconds unless stated otherwise.

    Measured on an H200 at 1.75 GHz; other Hopper devices are assumed to have the same latencies and fractions. Latencies assume that a
    kernel starts before the previous one ends (programmatic dependent launch), which is used for up to 64 rows.
    """

    first: float = 2.3e-6
    """One-row matmul with the fused norm (qkv 2.1, gate/up 2.4)."""
    last: float = 3.3e-6
    """One-row matmul that adds the residual (out 3.2, down 3.4)."""
    small: float = 1.2e-6
    """One-row router, QK norm, rotary embedding."""
    attention: float = 3.5e-6
    """One wave of decode attention, one work unit per SM: page lookup, softmax, sum over warps."""
    split: float = 2.0e-6
    """Combining the partial results of split sequences."""
    stream: float = 4.5e-6
    """Latency of a matmul that streams weights past up to eight rows (qkv 4.6, out 4.3)."""
    stream_share: float = 0.95
    """Fraction of the bandwidth that such a matmul reaches (0.92 to 0.96 with 160 to 800 MB)."""
    tiled: float = 2.0e-6
    """Latency of a tiled matmul."""
    widen: float = 0.43e-6
    """Dequantizing 128 rows x 128 inputs from 4 to 16 bits in the registers of one SM; matmuls of up to 64 rows hide behind it."""
    cache_port: float = 112e9
    """Bytes per second from L2 to one SM: 64 per clock."""
    route: float = 7.5e-6
    route_row: float = 0.1e-6
    """Router, top-k and work lists: 8.3 us for 8 rows, 14 for 64."""
    sum: float = 2.5e-6
    """Adding partial sums to the residual, and the norm after it."""
    sum_share: float = 0.6
    """Fraction of the bandwidth in passes over all activations of a prompt."""
    product_share: float = 0.7
    """Fraction of the matmul rate in full tiles of more than 64 rows: 0.77 in single kernels, 0.68 over a dense model's whole prefill."""
    block: float = 0.73e-6
    block_row: float = 6.0e-9
    """A block of 256 rows of weights x 128 inputs, times rows of 8 bits, in one SM: copies, and products with their scaling, which do not overlap.
    Single kernels: 1.36 us for 128 rows of a dense matrix, 1.48 for 150 of an expert, 0.8 for 80 (cuda-notes.md 30); somewhat more over a whole
    prefill: 19,600 tokens/s of 2,048 before the last of these changes."""
    round_share: float = 0.85
    """Fraction of the bandwidth in rounding rows to 8 bits (75 MB in 18 us)."""
    eager: float = 490e-6
    """A layer of a prompt takes at least this: its launches are not recorded (cuda-notes.md 27: 560 to 800 us; a prompt of 128 took 490 in 39)."""
    unit_blocks: float = 2.8
    """Overhead of one work unit of such a matmul, in blocks of 128 inputs."""
    score_share: float = 0.6
    """Fraction of the matmul rate in prefill attention."""
    dispatch: float = 25e-6
    """Routing a prompt's rows: top-k and work lists."""
    gap: float = 1.0e-6
    """Between kernels that wait for each other (no dependent launch)."""
    step: float = 40e-6
    """Per step: sampling, graph replay and host work."""
