"""The values of an engine's file: what it can do, what memory it takes, and how near to the roofline it comes on each class of device.

Decides nothing; `load.py` reads the files.
"""

from __future__ import annotations

from windlass.core.model import Frozen
from windlass.tasks.plan.engines.kernel_times import KernelTimes

CPU_CONTEXT_BYTES = 300_000_000
"""A Python process with torch loaded, on a CPU (measured: 250 to 300 MB resident)."""
ACTIVATION_BYTES, CPU_ACTIVATION_BYTES = 2, 4
"""bf16 on accelerators, fp32 on a CPU."""
CPU_STEP_TOKENS = 512
"""Tokens per step on a CPU (runtime/engine/memory.py)."""


class Rates(Frozen):
    """How an engine runs on one class of device. Fractions are of what the device was measured at; 1 and 0 are the ceiling."""

    read: float = 1.0
    """Dense matrices, of the read bandwidth."""
    packed: float = 1.0
    """Of that, with weights of fewer than 8 bits: unpacking them costs."""
    expert_read: float = 1.0
    """Routed experts, if they were large."""
    half_expert: float = 0.0
    """Bytes of one expert on a rank at which half of that is reached: small matrices do not fill the device."""
    cache: float = 1.0
    """The KV cache of a decode step."""
    latent_cache: float = 1.0
    """The same of latent attention, whose heads all read one latent: bound by its products before its bytes."""
    product: float = 1.0
    """Dense products of a prompt, of the matmul rate."""
    half_width: float = 0.0
    """Inputs of a row at which half of that is reached: rows begin and end."""
    expert_product: float = 1.0
    """Products of routed experts, when each has many rows."""
    half_rows: float = 0.0
    """Rows per expert at which its products reach half of that."""
    score: float = 1.0
    """Attention of a prompt."""
    attention_seconds: float = 0.0
    """Launches and small kernels of a layer's attention, beyond bytes and FLOPs."""
    latent_seconds: float = 0.0
    """The same of latent attention."""
    dense_seconds: float = 0.0
    """Of a dense feed-forward."""
    moe_seconds: float = 0.0
    """Of a routed one: router, top-k, sorting, two grouped products, sum."""
    core_seconds: float = 0.0
    """On a CPU: per layer and core, threads that meet after every operation."""
    moe_core_seconds: float = 0.0
    """The same of a layer with experts."""
    core_weights: float = 0.0
    """On a CPU: weights per second that a core unpacks and multiplies with one row; 0: no limit. Reads go on meanwhile, but not unhindered."""
    tried_cores: int = 0
    """On a CPU: figures rest on runs with at most so many cores; 0: with many."""
    grid_weights: float = 1.0
    """Of that, with types whose weights are looked up in a grid (IQ1 to IQ3)."""
    grid_product: float = 1.0
    """Of the products of a prompt, with such types."""
    peers: float = 0.0
    """Of a sum over TCP, where everybody writes to everybody: network latencies, times the square of the peers, whose messages arrive at once."""
    step_seconds: float = 0.0
    """Of a step: scheduler, inputs, sampling."""
    sequence_seconds: float = 0.0
    """Of a step, per sequence in it."""
    collective: float = 1.0
    """Large collectives, of the link's specification."""
    collective_seconds: float = 0.0
    """Latency of a small all-reduce inside a node; 0: by the link."""
    overlap: float = 0.0
    """Fraction of the exchange of experts that is hidden behind the other half of the batch."""
    host_read: float = 1.0
    """Weights in host memory that the CPU computes with, of the host's read bandwidth."""
    host_compute: float = 0.0
    """Bytes of packed weights per second that a host's cores get through, however fast its memory (and however many sockets); 0: no limit."""
    host_layer_seconds: float = 0.0
    """Of a layer whose experts the CPU computes: there and back, threads that start and meet."""
    host_stream: float = 1.0
    """Weights copied from host memory for a prompt, of the link's pinned bandwidth."""
    host_product: float = 1.0
    """The CPU's products of a prompt beside a device, of its plain AVX2 rate, when each expert has many rows."""
    host_half_rows: float = 0.0
    """Rows per expert at which they reach half of that."""
    pipeline: float = 1.0
    """With stages: of the rate if all were always busy. Micro-batches of unlike length leave gaps."""
    step_tokens: int = 0
    """Prompt tokens per step; 0: the engine's."""
    max_sequences: int = 0
    """Sequences at once by default; 0: the engine's."""


IDEAL = Rates()


class Note(Frozen):
    """Where a number of the file comes from."""

    what: str
    source: str
    date: str


class EngineProfile(Frozen):
    name: str
    title: str
    memory_fraction: float
    """Fraction of device memory that the engine uses."""
    context_bytes: int
    """CUDA context, code and graphs: used before any weights are loaded."""
    group_bytes: int
    """Communicator buffers, with more than one device."""
    step_tokens: int
    """Maximum prompt tokens per step (chunked prefill)."""
    max_sequences: int
    kinds: tuple[str, ...]
    """Device kinds it runs on: cuda, rocm, metal, cpu."""
    rates: dict[str, Rates]
    """By class of device (classes.py); `default` for the others."""
    notes: tuple[Note, ...]
    like: str = ""
    """Takes what it does not state itself from this engine."""
    schemes: tuple[str, ...] = ()
    """Names of the quantizations it loads, `q*` for a group of names; empty: all of ours."""
    caches: tuple[str, ...] = ("bf16", "fp8", "fp32")
    """Types of the KV cache."""
    splits: tuple[str, ...] = ("tp", "pp", "ep", "dp")
    """Degrees that may be more than 1."""
    offload_steps: bool = False
    """With weights in host memory, where every step copies them, takes as many prompt tokens a step as fit (core/tiers/steps.py)."""
    reserves_whole: bool = False
    """Admits a sequence only if its whole answer fits the KV cache; otherwise it takes blocks as it grows."""
    windowed_cache: bool = False
    """Frees KV blocks that a sliding window no longer sees."""
    uneven: bool = False
    """Can split heads and channels unevenly."""
    offload: bool = False
    """Runs with weights in host memory (and on disk)."""
    cpu_layers: bool = False
    """What lies in host memory is computed by the CPU; otherwise it is copied to the device."""
    only_offload: bool = False
    """Made for weights in host memory: not worth a mention without."""
    experts_over_replicas: bool = False
    """Expert parallelism spans the replicas too: ep is 1 or tp x dp; otherwise it divides tp."""
    redundant_experts: bool = False
    """Copies of the busiest experts fill up ranks where ep does not divide the number of experts."""
    disaggregates: bool = False
    """Can read prompts on other machines than it decodes on, and pass the KV cache on."""
    kinds_on_request: tuple[str, ...] = ()
    """Device kinds that are planned only when the engine is named with --engine."""
    cpu_schemes: tuple[str, ...] = ()
    """Schemes supported on a CPU; empty: the same as elsewhere."""
    rest_bits: dict[str, float] = {}
    """Bits of the matrices that a scheme of experts leaves in 16 bits, where this engine's files quantize them too."""
    rides: float = 0.0
    """Of a token that each decoding sequence gets for nothing in a step that reads prompts; 0: prompts have steps of their own."""
    block_tokens: int = 16
    kernel_times: KernelTimes | None = None
    """Costs of its own kernels, used where they support the model and the device (tasks/plan/speed/kernels.py)."""
