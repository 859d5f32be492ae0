"""ModelSpec: a frozen description of a model's architecture. Knows no tensor names, no devices, no torch.

A new kind of layer is a new struct here (and a mixer in `nn`), not another boolean on an existing one.
"""

from __future__ import annotations

from enum import Enum
from typing import dataclass_transform

from msgspec import Struct, StructMeta, field


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class FrozenMeta(StructMeta):
    """Tells type checkers that subclasses of a frozen struct are frozen."""


class Frozen(Struct, metaclass=FrozenMeta, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of immutable values; unknown JSON fields are refused."""


# --- positions -------------------------------------------------------------------------------------------------------


class LinearScaling(Frozen, tag="linear"):
    factor: float


class BandScaling(Frozen, tag="bands"):
    """Low frequencies are divided by `factor`, high ones kept, those in between interpolated (Llama 3.1, arXiv 2407.21783)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_tokens: int


class YarnScaling(Frozen, tag="yarn"):
    """NTK-by-parts interpolation with an attention temperature (arXiv 2309.00071)."""

    factor: float
    original_context_tokens: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True


class Rope(Frozen, tag="rope"):
    theta: float
    rotary_dim: int
    """Number of rotated dimensions per head (the first ones)."""
    interleaved: bool = False
    """Pairs are (0,1), (2,3)...; otherwise (i, i + rotary_dim / 2)."""
    scaling: LinearScaling | BandScaling | YarnScaling | None = None


class Alibi(Frozen, tag="alibi"):
    """Linear bias on attention scores with a slope per head, no position embedding (arXiv 2108.12409)."""

    before_scaling: bool = False
    """Added before the scores are scaled (Falcon-RW); otherwise after (BLOOM)."""


class LearnedPositions(Frozen, tag="learned"):
    max_positions: int
    """Rows of the position table."""


Positions = Rope | Alibi | LearnedPositions


# --- mixers: how a token attends to other tokens -----------------------------------------------------------------------


class Attention(Frozen, tag="attention"):
    """Multi-head, grouped-query or multi-query attention over cached keys and values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each head of Q and K before rotation."""
    window: int | None = None
    """Sliding window in tokens; None: full attention."""
    sinks: bool = False
    """A learned logit per head that is included in the softmax."""
    scale: float | None = None
    """Multiplies scores; None is head_dim ** -0.5."""

    @property
    def kv_elements(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def kv_vectors(self) -> int:
        """Keys and values that a token leaves in the cache, each of which has a scale in fp8."""
        return 2 * self.num_kv_heads

    @property
    def score_width(self) -> int:
        """Multiply-adds per (query, key) pair: one dot product per head and one weighted sum of values."""
        return 2 * self.num_heads * self.head_dim


class Indexer(Frozen):
    """Selects the top-k tokens of sparse attention (DeepSeek sparse attention). `own`: this layer has an indexer; otherwise it reuses
    the selection of the layer before."""

    num_heads: int
    head_dim: int
    top_k: int
    own: bool


class LatentAttention(Frozen, tag="latent"):
    """Multi-head latent attention: keys and values are compressed to one latent per token (arXiv 2405.04434)."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_head_dim: int
    rope_head_dim: int
    v_head_dim: int
    indexer: Indexer | None = None

    @property
    def kv_elements(self) -> int:
        return self.kv_lora_rank + self.rope_head_dim

    @property
    def kv_vectors(self) -> int:
        return 1

    @property
    def score_width(self) -> int:
        return self.num_heads * (self.nope_head_dim + self.rope_head_dim + self.v_head_dim)


class Convolution(Frozen, tag="convolution"):
    """A gated long convolution (StripedHyena 2). For memory planning only; Windlass does not run it."""

    filter_elements: int
    """Parameters of its filters, beyond the projections."""
    state_elements: int
    """State kept per sequence, independent of context length."""

    @property
    def kv_elements(self) -> int:
        return 0

    @property
    def kv_vectors(self) -> int:
        return 0

    @property
    def score_width(self) -> int:
        return 0


Mixer = Attention | LatentAttention | Convolution


# --- feed-forwards ---------------------------------------------------------------------------------------------------


class Activation(Enum):
    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    CLAMPED_SWIGLU = "clamped_swiglu"
    """(up + 1) * gate * sigmoid(1.702 * gate), both clamped (gpt-oss)."""


class Dense(Frozen, tag="dense"):
    intermediate_size: int
    gated: bool
    activation: Activation
    bias: bool = False


class Scoring(Enum):
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"
    SOFTMAX_OF_TOP = "softmax_of_top"
    """Softmax over the top-k logits only."""


class Router(Frozen):
    scoring: Scoring
    correction_bias: bool = False
    """A bias used for expert selection but not for the weights (auxiliary-loss-free balancing)."""
    renormalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
    bias: bool = False


class MoE(Frozen, tag="moe"):
    num_experts: int
    num_active: int
    intermediate_size: int
    router: Router
    activation: Activation
    shared_intermediate_size: int = 0
    """Total width of the shared experts; 0: none."""
    bias: bool = False
    clamp: float | None = None
    """Clamps gate and up before the activation."""


FeedForward = Dense | MoE


class Wiring(Enum):
    """Position of the norms and residual connections in a layer."""

    PRE = "pre"
    """x += mix(norm(x)); x += ffn(norm(x))"""
    SANDWICH = "sandwich"
    """PRE, plus a norm on both outputs before they are added"""
    PARALLEL = "parallel"
    """x += mix(norm1(x)) + ffn(norm2(x))"""
    PARALLEL_ONE_NORM = "parallel_one_norm"
    """x += mix(norm(x)) + ffn(norm(x))"""


class Norm(Frozen):
    kind: str
    """`rms` or `layer`; layer norms have a bias."""
    eps: float


class Layer(Frozen):
    mixer: Mixer
    feed_forward: FeedForward
    wiring: Wiring = Wiring.PRE


class NextTokenLayer(Frozen):
    """Multi-token prediction: an extra layer that predicts the token after next (arXiv 2412.19437, 2.2)."""

    layer: Layer
    own_embeddings: bool
    """The checkpoint stores its own copies of embedding and head."""


class ModelSpec(Frozen):
    name: str
    family: str
    hidden_size: int
    vocab_size: int
    context_tokens: int
    layers: tuple[Layer, ...]
    norm: Norm
    positions: Positions
    tied_head: bool
    head_copy: bool = False
    """Tied, but the checkpoint stores the head as well."""
    embedding_norm: bool = False
    final_norm: bool = True
    next_token: NextTokenLayer | None = None
    native_scheme: str = "bf16"
    """Scheme of the published checkpoint."""
    stop_token_ids: tuple[int, ...] = ()
    dropout: bool = False
    """Trained with dropout; only affects activation memory in training."""
    engines: tuple[str, ...] = ("windlass", "vllm")
    """Engines that can run it. Empty: planning only."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def moe_layers(self) -> tuple[MoE, ...]:
        return tuple(layer.feed_forward for layer in self.layers if isinstance(layer.feed_forward, MoE))

    @property
    def experts(self) -> MoE | None:
        """The routed feed-forward, where there is one (families here have one shape of it)."""
        return next((layer.feed_forward for layer in self.layers if isinstance(layer.feed_forward, MoE)), None)

    @property
    def attention(self) -> Attention | LatentAttention:
        """The mixer that has heads; every family has at least one."""
        return next(layer.mixer for layer in self.layers if not isinstance(layer.mixer, Convolution))


def kv_bytes_per_token(spec: ModelSpec, element_bytes: float = 2, vector_bytes: float = 0) -> int:
    """Keys and values one token leaves in the cache, all layers, unsplit: 2 * kv_heads * head_dim (GQA), latent + rope (MLA).

    `vector_bytes`: beside each key and each value of a head (the scale of fp8).
    """
    vectors = sum(layer.mixer.kv_vectors for layer in spec.layers)
    return round(sum(layer.mixer.kv_elements for layer in spec.layers) * element_bytes + vectors * vector_bytes)


def layer_cache_bytes(mixer: Mixer, tokens: int, element_bytes: float, windowed: bool, vector_bytes: float = 0) -> float:
    """KV cache bytes of one layer for a sequence of `tokens`.

    `windowed`: the engine evicts tokens outside a sliding window. An indexer caches one key per token, in the KV dtype.
    A convolution keeps a fixed fp32 state. `vector_bytes`: see kv_bytes_per_token.
    """
    if isinstance(mixer, Convolution):
        return mixer.state_elements * 4
    scales = mixer.kv_vectors * vector_bytes
    if isinstance(mixer, Attention):
        kept = min(tokens, mixer.window) if windowed and mixer.window else tokens
        return kept * (mixer.kv_elements * element_bytes + scales)
    index = mixer.indexer.head_dim if mixer.indexer and mixer.indexer.own else 0
    return tokens * ((mixer.kv_elements + index) * element_bytes + scales)
