"""What a model is: a frozen description that every other package reads. Knows no tensor names, no devices, no torch.

A new kind of mathematics is a new struct here (and later a mixer file in `nn`), never another boolean on an old one.
"""

from __future__ import annotations

from enum import Enum
from typing import dataclass_transform

from msgspec import Struct, StructMeta, field


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class FrozenMeta(StructMeta):
    """Tells type checkers what msgspec does: whatever inherits from a frozen struct is frozen."""


class Frozen(Struct, metaclass=FrozenMeta, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every value that is written to or read from JSON: immutable and strict."""


# --- positions -------------------------------------------------------------------------------------------------------


class LinearScaling(Frozen, tag="linear"):
    factor: float


class BandScaling(Frozen, tag="bands"):
    """Low frequencies are divided by `factor`, high ones kept, those between interpolated (Llama 3.1, arXiv 2407.21783)."""

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
    """How many of a head's dimensions are rotated (the first ones)."""
    interleaved: bool = False
    """Pairs are (0,1), (2,3)...; otherwise (i, i + rotary_dim / 2)."""
    scaling: LinearScaling | BandScaling | YarnScaling | None = None


class Alibi(Frozen, tag="alibi"):
    """A linear bias on attention scores, a slope per head; no position embedding (arXiv 2108.12409)."""

    before_scaling: bool = False
    """Added to the raw scores, so that it is scaled with them (Falcon-RW); otherwise added after scaling (BLOOM)."""


class LearnedPositions(Frozen, tag="learned"):
    max_positions: int
    """Rows of the position table."""


Positions = Rope | Alibi | LearnedPositions


# --- mixers: how a token looks at other tokens -----------------------------------------------------------------------


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
    """Tokens a sliding window sees; None sees all."""
    sinks: bool = False
    """A learned logit per head that takes part in the softmax."""
    scale: float | None = None
    """Multiplies scores; None is head_dim ** -0.5."""

    @property
    def kv_elements(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def score_width(self) -> int:
        """Multiply-adds per (query, key) pair: one dot product per head and one weighted sum of values."""
        return 2 * self.num_heads * self.head_dim


class Indexer(Frozen):
    """Picks the top-k tokens that sparse attention looks at (DeepSeek sparse attention). `own`: this layer computes the choice."""

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
    def score_width(self) -> int:
        return self.num_heads * (self.nope_head_dim + self.rope_head_dim + self.v_head_dim)


class Convolution(Frozen, tag="convolution"):
    """A gated long convolution (StripedHyena 2). Described so that memory can be planned; no engine of ours runs it."""

    filter_elements: int
    """Parameters of its filters, beyond the projections."""
    state_elements: int
    """Values kept per sequence and channel, whatever the context."""

    @property
    def kv_elements(self) -> int:
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
    """Softmax over the chosen logits only."""


class Router(Frozen):
    scoring: Scoring
    correction_bias: bool = False
    """A bias added for choosing, not for weighing (loss-free balancing)."""
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
    """Width of the experts every token passes (all shared ones together); 0 has none."""
    bias: bool = False
    clamp: float | None = None
    """Limit of gate and up before the activation."""


FeedForward = Dense | MoE


class Wiring(Enum):
    """Where a layer's norms stand and what is added to what."""

    PRE = "pre"
    """x += mix(norm(x)); x += ffn(norm(x))"""
    SANDWICH = "sandwich"
    """as PRE, and the output of both halves is normed before it is added"""
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
    """Multi-token prediction: one more layer that guesses the token after next (arXiv 2412.19437, 2.2)."""

    layer: Layer
    own_embeddings: bool
    """The checkpoint carries copies of the embedding and the head for it."""


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
    """Tied, and the checkpoint stores the head all the same."""
    embedding_norm: bool = False
    final_norm: bool = True
    next_token: NextTokenLayer | None = None
    native_scheme: str = "bf16"
    """How the published checkpoint stores its matrices."""
    stop_token_ids: tuple[int, ...] = ()
    dropout: bool = False
    """Trained with dropout; only counts in the activations of training."""
    engines: tuple[str, ...] = ("windlass", "vllm")
    """Who can run it. Empty: described so that its memory can be planned."""

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


def kv_bytes_per_token(spec: ModelSpec, element_bytes: float = 2) -> int:
    """Keys and values one token leaves in the cache, all layers, unsplit: 2 * kv_heads * head_dim (GQA), latent + rope (MLA)."""
    return round(sum(layer.mixer.kv_elements for layer in spec.layers) * element_bytes)


def layer_cache_bytes(mixer: Mixer, tokens: int, element_bytes: float, windowed: bool) -> float:
    """What one sequence of `tokens` keeps in one layer.

    `windowed`: the engine drops what a sliding window no longer sees. An indexer keeps one key per token, in the KV type.
    A convolution keeps a fixed state in fp32.
    """
    if isinstance(mixer, Convolution):
        return mixer.state_elements * 4
    if isinstance(mixer, Attention):
        kept = min(tokens, mixer.window) if windowed and mixer.window else tokens
        return kept * mixer.kv_elements * element_bytes
    index = mixer.indexer.head_dim if mixer.indexer and mixer.indexer.own else 0
    return tokens * (mixer.kv_elements + index) * element_bytes
