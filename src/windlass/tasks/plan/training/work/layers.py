"""A layer, the embedding and the head as lists of operations on one rank for one micro-batch."""

from __future__ import annotations

from windlass.core.model import Layer, ModelSpec, Rope, Wiring
from windlass.core.recipe.sections import LossKind
from windlass.tasks.plan.training.job import TrainingJob
from windlass.tasks.plan.training.work.attention import BF16, input_bytes, mixer_operations
from windlass.tasks.plan.training.work.feed_forward import feed_forward_operations
from windlass.tasks.plan.training.work.operation import Operation, matmul, memory

NORMS = {Wiring.PRE: 2, Wiring.SANDWICH: 4, Wiring.PARALLEL: 2, Wiring.PARALLEL_ONE_NORM: 1}
TENSOR_REGIONS = {Wiring.PRE: 2, Wiring.SANDWICH: 2, Wiring.PARALLEL: 1, Wiring.PARALLEL_ONE_NORM: 1}
"""How often a layer enters and leaves the tensor-parallel region."""


def layer_operations(spec: ModelSpec, layer: Layer, job: TrainingJob) -> tuple[Operation, ...]:
    """Sums to arXiv 2205.05198's 34 sbh + 5 a s^2 b for a GPT layer with dropout."""
    hidden = spec.hidden_size
    rotary = isinstance(spec.positions, Rope)
    mixing = mixer_operations(layer.mixer, hidden, spec.dropout, rotary, job)
    forwarding = feed_forward_operations(layer.feed_forward, hidden, job, own_input=layer.wiring is not Wiring.PARALLEL_ONE_NORM)
    return (*_norms(layer.wiring, hidden, job), *mixing, *forwarding, *_residuals(spec, layer, job))


def _norms(wiring: Wiring, hidden: int, job: TrainingJob) -> tuple[Operation, ...]:
    """Each keeps its input; the backward reads it and the gradient and writes one."""
    elements = job.outside_tokens * hidden
    norm = memory("norm", elements, 4, 6, saved_bytes=BF16 * elements)
    return (norm,) * NORMS[wiring]


def _residuals(spec: ModelSpec, layer: Layer, job: TrainingJob) -> tuple[Operation, ...]:
    """Two reads and a write each way (going backward, the branch's gradient joins); dropout adds a byte of mask, fused."""
    elements = job.outside_tokens * spec.hidden_size
    mask = 1 if spec.dropout else 0
    add = memory("residual", elements, 6 + mask, 6, saved_bytes=0.0)
    dropout = memory("dropout", elements, 0, 5, saved_bytes=mask * elements)
    parts = 2
    return (add,) * min(parts, TENSOR_REGIONS[layer.wiring]) + ((dropout,) * parts if mask else ())


def embedding_operations(spec: ModelSpec, job: TrainingJob) -> tuple[Operation, ...]:
    """A row read and written; the gradient is added to an fp32 table."""
    elements = job.outside_tokens * spec.hidden_size
    mask = 1 if spec.dropout else 0
    return (memory("embedding", elements, 4 + mask, 10, saved_bytes=mask * elements),)


LOGIT_BYTES = {"whole": 12.0, "fused": 4.0}
"""At the peak, per logit. Whole: 16-bit logits, log-softmax and its gradient in fp32, the 16-bit gradient. Fused: fp32 probabilities in
place (4 sbv / t, arXiv 2205.05198, 4.3)."""
CHUNK_TOKENS = 512
"""Tokens of a chunked loss at a time: torchtune takes an eighth of the batch, TRL 256, `windlass train` half a gigabyte of 16-bit logits."""


def logits_bytes(logits: float, tokens: float, loss: LossKind) -> float:
    if loss == "chunked":
        return LOGIT_BYTES["whole"] * logits * min(CHUNK_TOKENS / tokens, 1.0)
    return LOGIT_BYTES[loss] * logits


def head_operations(spec: ModelSpec, job: TrainingJob) -> tuple[Operation, ...]:
    """Final norm, logits, and a loss over them.

    Logits are cast (2 read, 4 written), read for the maximum, exponentiated in place; the backward writes them back in 16 bits.
    """
    hidden, outside = spec.hidden_size, job.outside_tokens
    vocabulary = spec.vocab_size / job.groups.tp
    logits = job.micro_tokens * vocabulary
    compute = "bf16" if job.compute == "fp8" else job.compute  # recipes keep the head in 16 bits
    return (
        memory("final norm", outside * hidden, 4, 6, saved_bytes=BF16 * outside * hidden),
        matmul("head", job.micro_tokens, hidden, vocabulary, compute=compute, saved_bytes=BF16 * outside * hidden),
        memory("loss", logits, 18, 6, saved_bytes=logits_bytes(logits, job.micro_tokens, job.loss)),
    )


def next_token_operations(spec: ModelSpec, job: TrainingJob) -> tuple[Operation, ...]:
    """The multi-token-prediction layer: two norms, a product from both halves, a layer and the head again (arXiv 2412.19437, 2.2)."""
    if spec.next_token is None or not job.next_token:
        return ()
    hidden, outside = spec.hidden_size, job.outside_tokens
    join = matmul(
        "join",
        job.micro_tokens,
        2 * hidden,
        hidden / job.groups.tp,
        compute=job.compute,
        saved_bytes=2 * input_bytes(job) * outside * hidden,
    )
    norm = memory("norm", 2 * outside * hidden, 4, 6, saved_bytes=2 * BF16 * outside * hidden)
    return (norm, join, *layer_operations(spec, spec.next_token.layer, job), *head_operations(spec, job))
