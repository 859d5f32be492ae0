"""Operations of attention per rank and micro-batch, after arXiv 2205.05198, section 4.1.

With one KV head per query head, dropout and unfused scores, the items sum to that paper's 11 sbh + 5 a s^2 b. Knows no device.
"""

from __future__ import annotations

from windlass.core.count import mixer_flops
from windlass.core.model import Attention, LatentAttention, Mixer
from windlass.errors import Impossible
from windlass.tasks.plan.training.job import TrainingJob
from windlass.tasks.plan.training.work.operation import KernelWork, Operation, OperationKind, adapted, casts, matmul, memory

BF16 = 2
CAUSAL_HALF = 0.5
"""A causal kernel skips the masked half of the scores; unfused attention computes all of them."""
FLASH_BACKWARD = 2.5
"""FLOPs of flash attention's backward over its forward: five products against two (arXiv 2307.08691, 4.1)."""


class AttentionWidths:
    """Widths on one rank after the projections."""

    def __init__(
        self, query: float, key: float, value: float, output: float, heads: float, key_dim: float, value_dim: float
    ) -> None:
        self.query, self.key, self.value, self.output = query, key, value, output
        self.heads, self.key_dim, self.value_dim = heads, key_dim, value_dim


def mixer_operations(mixer: Mixer, hidden: int, dropout: bool, rotary: bool, job: TrainingJob) -> tuple[Operation, ...]:
    """From the normed input to the output projection, both included."""
    if isinstance(mixer, Attention):
        widths, into = _grouped(mixer, hidden, job)
    elif isinstance(mixer, LatentAttention):
        widths, into = _latent(mixer, hidden, job)
    else:
        raise Impossible("training of convolution mixers is not supported")
    turned = _rotation(widths, job) if rotary else ()
    return (*into, *turned, *_core(mixer, widths, dropout, job), *_output(widths, hidden, job))


def input_bytes(job: TrainingJob) -> int:
    """A matmul keeps its input for the weight gradient; with FP8 the 8-bit copy (Transformer Engine), or 16 bits (torchao)."""
    return 1 if job.compute == "fp8" and job.framework == "megatron" else 4 if job.compute == "fp32" else BF16


def _grouped(mixer: Attention, hidden: int, job: TrainingJob) -> tuple[AttentionWidths, tuple[Operation, ...]]:
    tp, tokens = job.groups.tp, job.micro_tokens
    heads, kv_heads = mixer.num_heads / tp, max(mixer.num_kv_heads / tp, 1.0)
    query, key = heads * mixer.head_dim, kv_heads * mixer.head_dim
    outputs = query + 2 * key
    project = matmul(
        "qkv", tokens, hidden, outputs, compute=job.compute, saved_bytes=input_bytes(job) * job.input_tokens * hidden
    )
    operations = (
        *casts("qkv", job.compute, tokens, hidden, outputs),
        *adapted((project,), "qkv", tokens, hidden, outputs, job, "attention"),
    )
    if mixer.qk_norm:
        elements = tokens * (query + key)
        operations += (memory("qk norm", elements, 4, 6, saved_bytes=BF16 * elements),)
    return AttentionWidths(query, key, key, query, heads, mixer.head_dim, mixer.head_dim), operations


def _latent(mixer: LatentAttention, hidden: int, job: TrainingJob) -> tuple[AttentionWidths, tuple[Operation, ...]]:
    """Down-projection to the latents on this rank's tokens, norms, all-gather, up-projection to this rank's heads (Megatron-Core's MLA)."""
    tokens, outside, kept = job.micro_tokens, job.outside_tokens, input_bytes(job)
    heads, key_dim = mixer.num_heads / job.groups.tp, mixer.nope_head_dim + mixer.rope_head_dim
    q_rank, kv_rank = mixer.q_lora_rank or 0, mixer.kv_lora_rank
    latents, up = q_rank + kv_rank, heads * (mixer.nope_head_dim + mixer.v_head_dim)
    down = (q_rank or heads * key_dim) + kv_rank + mixer.rope_head_dim
    operations = (
        *casts("down", job.compute, outside, hidden, down),
        matmul("down", outside, hidden, down, compute=job.compute, saved_bytes=kept * outside * hidden),
        memory("latent norms", outside * latents, 4, 6, saved_bytes=BF16 * outside * (latents + mixer.rope_head_dim)),
        matmul("kv up", tokens, kv_rank, up, compute=job.compute, saved_bytes=kept * outside * kv_rank),
    )
    if q_rank:
        operations += (matmul("q up", tokens, q_rank, heads * key_dim, compute=job.compute, saved_bytes=kept * outside * q_rank),)
    key, value = heads * key_dim, heads * mixer.v_head_dim
    return AttentionWidths(key, key, value, value, heads, key_dim, mixer.v_head_dim), operations


def _rotation(widths: AttentionWidths, job: TrainingJob) -> tuple[Operation, ...]:
    """Read, rotated and written; the backward needs only the angles."""
    return (memory("rope", job.micro_tokens * (widths.query + widths.key), 4, 4),)


def _core(mixer: Attention | LatentAttention, widths: AttentionWidths, dropout: bool, job: TrainingJob) -> tuple[Operation, ...]:
    tokens = job.micro_tokens
    inputs = BF16 * tokens * (widths.query + widths.key + widths.value)
    if job.flash_attention:
        return (_flash(mixer, widths, inputs, job),)
    scores = widths.heads * tokens * job.sequence_tokens
    operations = (
        _product("scores", scores * widths.key_dim, tokens * (widths.query + widths.key), scores, saved_bytes=inputs, core=False),
        memory("softmax", scores, 4, 6, saved_bytes=BF16 * scores, core=True),
        _product("weighted sum", scores * widths.value_dim, tokens * (widths.value + widths.output), scores),
    )
    if dropout:  # a byte of mask and the dropped scores
        operations += (memory("score dropout", scores, 5, 5, saved_bytes=(1 + BF16) * scores, core=True),)
    return operations


def _flash(mixer: Attention | LatentAttention, widths: AttentionWidths, inputs: float, job: TrainingJob) -> Operation:
    """Keeps Q, K and V and a 4-byte log-sum-exp per head and token; its output is kept once, by the output projection."""
    tokens = job.micro_tokens
    flops = mixer_flops(mixer, job.sequence_tokens * CAUSAL_HALF) / job.groups.tp * tokens
    moved = BF16 * tokens * (widths.query + widths.key + widths.value + widths.output)
    return Operation(
        name="attention",
        kind=OperationKind.FLASH,
        forward=(KernelWork(flops=flops, moved_bytes=moved),),
        backward=(KernelWork(flops=FLASH_BACKWARD * flops, moved_bytes=2 * moved),),
        saved_bytes=inputs + 4 * tokens * widths.heads,
        core=False,
        output_bytes=tokens * (BF16 * widths.output + 4 * widths.heads),
    )


def _product(
    name: str, multiply_adds: float, elements: float, scores: float, saved_bytes: float = 0.0, core: bool = True
) -> Operation:
    """A batched product that reads or writes the scores; its backward is two of the same size."""
    work = KernelWork(flops=2.0 * multiply_adds, moved_bytes=BF16 * (elements + scores))
    return Operation(
        name=name, kind=OperationKind.PRODUCT, forward=(work,), backward=(work, work), saved_bytes=saved_bytes, core=core
    )


def _output(widths: AttentionWidths, hidden: int, job: TrainingJob) -> tuple[Operation, ...]:
    tokens = job.micro_tokens
    saved = BF16 * tokens * widths.output  # also what flash attention needs again, so never only the 8-bit copy
    project = matmul("output", tokens, widths.output, hidden, compute=job.compute, saved_bytes=saved)
    adapter = adapted((project,), "output", tokens, widths.output, hidden, job, "attention")
    return (*casts("output", job.compute, tokens, widths.output, hidden), *adapter)
