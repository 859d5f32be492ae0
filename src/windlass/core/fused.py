"""What the GPU's own kernels take (kernels/cuda): the planner must know it without PyTorch, and nn.fused goes by the same words."""

from __future__ import annotations

from windlass.core.model import Activation, Attention, Dense, FeedForward, Mixer, ModelSpec, Rope, Scoring, Wiring
from windlass.core.scheme import Scheme

DEVICES = ("H100", "H200", "H800", "H20", "GH200")
"""Hopper: bulk copies, dependent launches and warpgroup products are what the kernels are made of."""
HEAD_DIM = 128
MAX_WIDTH = 8192
MAX_SLOTS = 16
"""Experts of a token, the shared one included: what the kernels of one row have room for."""
MAX_QUERIES = 16
"""Query heads to a key."""
BLOCK_INPUTS, TILE_ROWS = 128, 16


def lacks(spec: ModelSpec) -> str:
    """What of the model the kernels have no form for; empty where every layer is made of what they know."""
    if spec.norm.kind != "rms" or spec.embedding_norm or not spec.final_norm or not isinstance(spec.positions, Rope):
        return "norms or positions of another kind"
    rotated, hidden = spec.positions.rotary_dim, spec.hidden_size
    if rotated % 16 or hidden % 256 or hidden > MAX_WIDTH or not _fills_tiles(hidden):
        return f"a hidden size of {hidden} or rotation of {rotated} dimensions"
    for layer in spec.layers:
        reason = _mixer_lacks(layer.mixer) or _ffn_lacks(layer.feed_forward)
        if reason or layer.wiring is not Wiring.PRE:
            return reason or "layers wired in another way"
    return ""


def storage_lacks(how: Scheme) -> str:
    """The same of how numbers are stored: symmetric 4-bit weights beside 16-bit keys and values."""
    if how.name != "int4" or how.zero_points:
        return f"{how.name} weights" + (" with zero points" if how.zero_points else "")
    return "" if how.kv == "bf16" else f"{how.kv} keys and values"


def has_kernels(device_name: str) -> bool:
    return device_name.split("-")[0] in DEVICES


def num_blocks(inputs: int) -> int:
    """Blocks of a row of weights. Warps share them: a number that up to 11 warps divide evenly, at least five of them."""
    count = -(-inputs // BLOCK_INPUTS)
    while count > 16 and not any(count % warps == 0 for warps in range(5, 12)):
        count += 1
    return count


def _mixer_lacks(mixer: Mixer) -> str:
    if not isinstance(mixer, Attention) or mixer.head_dim != HEAD_DIM or mixer.out_bias:
        return f"attention that is not of heads of {HEAD_DIM}"
    if not _fills_tiles(mixer.num_heads * HEAD_DIM):
        return f"{mixer.num_heads} heads"
    queries, uneven = divmod(mixer.num_heads, mixer.num_kv_heads)
    if mixer.window is not None or mixer.sinks or queries > MAX_QUERIES or uneven:
        return f"attention with a window, sinks, or more than {MAX_QUERIES} queries to a key"
    return ""


def _ffn_lacks(ffn: FeedForward) -> str:
    if ffn.activation is not Activation.SILU:
        return f"an activation other than SiLU ({ffn.activation.value})"
    if isinstance(ffn, Dense):
        return "" if ffn.gated and not ffn.bias else "a feed-forward without a gate, or with biases"
    router = ffn.router
    if router.num_groups > 1 or router.bias or not (router.renormalize or router.scoring is Scoring.SOFTMAX_OF_TOP):
        return "a router with groups, a bias, or weights that are not divided by their sum"
    if router.correction_bias and router.scoring is not Scoring.SIGMOID:
        return "a softmax with a correction"
    slots = ffn.num_active + bool(ffn.shared_intermediate_size)
    if ffn.num_experts % 32 or slots > MAX_SLOTS or not _fills_tiles(ffn.intermediate_size) or ffn.bias or ffn.clamp is not None:
        return "experts of another form"
    return "" if ffn.shared_intermediate_size in (0, ffn.intermediate_size) else "shared experts of another width"


def _fills_tiles(inputs: int) -> bool:
    """Whether matrices of so many inputs are not filled up: only a dense feed-forward's activations are made wider for that."""
    return num_blocks(inputs) * BLOCK_INPUTS == inputs
