"""What the fused Hopper kernels (runtime/kernels/cuda) support. Torch-free, for the planner; runtime/nn/fused uses the same limits."""

from __future__ import annotations

from windlass.core.model import Activation, Attention, Dense, FeedForward, Mixer, ModelSpec, Rope, Scoring, Wiring
from windlass.core.scheme import Scheme

DEVICES = ("H100", "H200", "H800", "H20", "GH200")
"""Hopper: the kernels use TMA, programmatic dependent launch and WGMMA."""
KV_TYPES = ("bf16", "fp8")
HEAD_DIM = 128
MAX_WIDTH, MAX_ROUTED_WIDTH = 16384, 8192
"""Hidden sizes: of any model, and with routed experts."""
ONE_ROW_WIDTH = 8192
"""Hidden sizes for which one row has kernels of its own."""
MAX_SLOTS = 16
"""Experts of a token, the shared one included, that the one-row kernels support."""
MAX_QUERIES = 16
"""Query heads per kv head."""
BLOCK_INPUTS, TILE_ROWS = 128, 16
MAX_SLICE_BLOCKS = 8


def unsupported(spec: ModelSpec) -> str:
    """What the kernels do not support of the model; empty if they support all of it."""
    if spec.norm.kind != "rms" or spec.embedding_norm or not spec.final_norm or not isinstance(spec.positions, Rope):
        return "norms or positions other than RMS norm and RoPE"
    rotated, hidden = spec.positions.rotary_dim, spec.hidden_size
    widest = MAX_ROUTED_WIDTH if spec.experts is not None else MAX_WIDTH
    if rotated % 16 or hidden % 256 or hidden > widest or not _fills_tiles(hidden):
        return f"a hidden size of {hidden} or {rotated} rotary dimensions"
    for layer in spec.layers:
        reason = _unsupported_mixer(layer.mixer) or _unsupported_feed_forward(layer.feed_forward)
        if reason or layer.wiring is not Wiring.PRE:
            return reason or "layers that are not pre-norm"
    return ""


def unsupported_storage(storage: Scheme) -> str:
    """What they do not support of the storage: only symmetric int4 weights with a KV cache in bf16 or fp8 are supported."""
    if storage.name != "int4" or storage.zero_points:
        return f"{storage.name} weights" + (" with zero points" if storage.zero_points else "")
    return "" if storage.kv in KV_TYPES else f"a KV cache in {storage.kv}"


def has_kernels(device_name: str) -> bool:
    return device_name.split("-")[0] in DEVICES


def num_blocks(inputs: int) -> int:
    """Blocks of a row of weights, padded so that 5 to 11 warps divide them evenly."""
    count = -(-inputs // BLOCK_INPUTS)
    while count > 16 and not any(count % warps == 0 for warps in range(5, 12)):
        count += 1
    return count


def slice_blocks(blocks: int) -> int:
    """Of a dense feed-forward with so many blocks of 128 intermediate outputs: blocks of a slice, which may lie in host memory."""
    return next(size for size in range(MAX_SLICE_BLOCKS, 0, -1) if blocks % size == 0)


def _unsupported_mixer(mixer: Mixer) -> str:
    if not isinstance(mixer, Attention) or mixer.head_dim != HEAD_DIM or mixer.out_bias:
        return f"attention without heads of {HEAD_DIM} dimensions"
    if not _fills_tiles(mixer.num_heads * HEAD_DIM):
        return f"{mixer.num_heads} heads"
    queries, uneven = divmod(mixer.num_heads, mixer.num_kv_heads)
    if mixer.window is not None or mixer.sinks or queries > MAX_QUERIES or uneven:
        return f"attention with a sliding window, sinks, or more than {MAX_QUERIES} query heads per kv head"
    return ""


def _unsupported_feed_forward(ffn: FeedForward) -> str:
    if ffn.activation is not Activation.SILU:
        return f"an activation other than SiLU ({ffn.activation.value})"
    if isinstance(ffn, Dense):
        return "" if ffn.gated and not ffn.bias else "a feed-forward without a gate, or with biases"
    router = ffn.router
    if router.num_groups > 1 or router.bias or not (router.renormalize or router.scoring is Scoring.SOFTMAX_OF_TOP):
        return "a router with groups, a bias, or unnormalized weights"
    if router.correction_bias and router.scoring is not Scoring.SIGMOID:
        return "a softmax router with a correction bias"
    slots = ffn.num_active + bool(ffn.shared_intermediate_size)
    if ffn.num_experts % 32 or slots > MAX_SLOTS or not _fills_tiles(ffn.intermediate_size) or ffn.bias or ffn.clamp is not None:
        return "experts with unsupported sizes, biases or clamping"
    return (
        ""
        if ffn.shared_intermediate_size in (0, ffn.intermediate_size)
        else "shared experts of a different width than the routed ones"
    )


def _fills_tiles(inputs: int) -> bool:
    """Whether matrices with this many inputs need no padding: only a dense feed-forward's activations are padded."""
    return num_blocks(inputs) * BLOCK_INPUTS == inputs
