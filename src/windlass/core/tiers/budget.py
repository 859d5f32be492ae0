"""Host memory that a rank on the CPU needs beside its weights. Numbers only; the planner and the engine count the same.

Tests measure the process against these.
"""

from __future__ import annotations

from windlass.core.model import Attention, Convolution, Dense, LatentAttention, Layer, ModelSpec
from windlass.units import MIB

PROCESS_BYTES = 320 * MIB
"""A Python process with torch and the engine loaded, before any weight."""
LOADING_BYTES = 64 * MIB
"""Beside the weights while they load: a slice being read and one being packed, buffers for writing, thread stacks."""
GPU_PROCESS_BYTES = 2048 * MIB
"""Of host memory, by a rank on a GPU beside its weights there, all in all: Python, torch, the driver's context, compilers, libraries that are loaded
late, captured graphs, the mailbox. 1.85 GiB after warm-up and prompts on an H200 (7.26 GiB at most, of which 5.41 were blocks of experts); the rest
is margin."""
GPU_GROWTH_BYTES = 640 * MIB
"""The same from the moment that weights are placed, by a process that had more than that before: 0.54 GiB there, from loaded to the last prompt."""
STEP_TOKENS = 512
"""Rows of the largest step on a CPU (runtime/engine/memory.py)."""
STEP_LOGITS = 64
FLOAT_BYTES = 4


def gpu_reserve_bytes(used_bytes: int) -> int:
    """Host memory that a rank on a GPU will need beside its weights and what it uses already."""
    return max(GPU_PROCESS_BYTES - used_bytes, GPU_GROWTH_BYTES)


def activation_bytes(spec: ModelSpec, num_sequences: int, step_tokens: int | None = None) -> int:
    """Of a step of most rows, in fp32: the residual and what a layer makes of it; and logits, twice for sampling."""
    rows = max(step_tokens or STEP_TOKENS, num_sequences + 1)
    widest = max(_mixer_width(layer) + _ffn_width(layer, spec.hidden_size) for layer in spec.layers)
    return FLOAT_BYTES * (rows * (6 * spec.hidden_size + widest) + 2 * max(STEP_LOGITS, num_sequences) * spec.vocab_size)


def _mixer_width(layer: Layer) -> int:
    match layer.mixer:
        case Attention() as mixer:
            return (2 * mixer.num_heads + 2 * mixer.num_kv_heads) * mixer.head_dim
        case LatentAttention() as mixer:
            return mixer.num_heads * (3 * mixer.kv_lora_rank + 2 * (mixer.nope_head_dim + mixer.rope_head_dim))
        case Convolution():
            return 0


def _ffn_width(layer: Layer, hidden_size: int) -> int:
    """A mixture gathers its rows by expert, and keeps what is between the products (runtime/kernels/cpu/experts.py)."""
    ffn = layer.feed_forward
    if isinstance(ffn, Dense):
        return 3 * ffn.intermediate_size
    return ffn.num_active * (hidden_size + 3 * ffn.intermediate_size) + 3 * ffn.shared_intermediate_size + ffn.num_experts
