"""The decoder of every family: tokens in, logits out. A ModelSpec describes the family; nothing here depends on its name.

A call takes a `Step`: the tokens of several sequences in rows, with their positions and cache slots. `decoder(step, caches)` serves;
`decoder(step)` needs no cache, takes whole sequences and supports gradients.

A rank of several holds a `ModelShard`: its layers, and of these its heads, channels and experts. All ranks are called with the same steps.

The forward pass only calls operations of `kernels` and takes views, because on the CPU it is recorded once and replayed without Python.
What depends on the model alone is computed at construction.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from windlass.core import model
from windlass.core.ports import Weights
from windlass.errors import BadInput, Impossible
from windlass.runtime.kernels.ops.gather import gather
from windlass.runtime.kernels.ops.linear import embed
from windlass.runtime.kernels.ops.norm import add
from windlass.runtime.kernels.program import program
from windlass.runtime.kernels.step import KvCache, Step
from windlass.runtime.nn.layer import DecoderLayer
from windlass.runtime.nn.linear import as_parameter
from windlass.runtime.nn.mixers.positions import Rotary
from windlass.runtime.nn.mtp import MtpLayer
from windlass.runtime.nn.norm import NormLayer
from windlass.runtime.nn.parallel.shard import WHOLE, ModelShard
from windlass.runtime.nn.parallel.stage import stage_of
from windlass.runtime.nn.parallel.vocabulary import vocabulary_of


class FusedPass(Protocol):
    """nn.fused.FusedDecoder, which is imported only where it is used."""

    hidden: Tensor | None

    def __call__(self, step: Step, caches: Sequence[KvCache]) -> Tensor: ...

    def prepare(
        self, max_rows: int, steps: Iterable[Step], caches: Sequence[KvCache], then: Iterable[Callable[[], object]] = ()
    ) -> None: ...


class Decoder(nn.Module):
    tier: Any = None
    """What fills those of its weights that are not in memory (offload); lives as long as the decoder."""

    def __init__(
        self,
        spec: model.ModelSpec,
        weights: Weights,
        context_tokens: int | None = None,
        *,
        shard: ModelShard = WHOLE,
        mtp: bool = False,
    ) -> None:
        """`context_tokens`: the maximum sequence length; by default the model's. `weights` are those of the shard. `mtp`: with the MTP layer."""
        super().__init__()
        self.spec, self.dtype = spec, weights.dtype
        self.logit_dtype = torch.promote_types(weights.dtype, torch.float32)
        self.context_tokens = _context(spec, context_tokens)
        self.shard, self.stage, self.vocabulary = shard, stage_of(shard), vocabulary_of(shard, spec.vocab_size)
        has_table = shard.is_first or (shard.is_last and spec.tied_head)
        self.table = as_parameter(weights.matrix("embed.weight")) if has_table else None
        learned = isinstance(spec.positions, model.LearnedPositions) and shard.is_first
        self.position_table = as_parameter(weights.matrix("positions.weight")) if learned else None
        self.embed_norm = NormLayer(spec.norm, weights, "embed_norm") if spec.embedding_norm and shard.is_first else None
        rotary = Rotary(spec.positions, self.context_tokens, weights) if isinstance(spec.positions, model.Rope) else None
        self.layers = nn.ModuleList(DecoderLayer(spec, index, weights, rotary, shard) for index in range(*shard.layers(spec)))
        self.norm = NormLayer(spec.norm, weights, "norm") if spec.final_norm and shard.is_last else None
        has_head = shard.is_last and not spec.tied_head
        self.head = as_parameter(weights.matrix("head.weight")) if has_head else self.table
        self.mtp = MtpLayer(spec, weights, rotary) if mtp and spec.next_token is not None else None
        self.normed: Tensor | None = None
        """[rows, hidden] after the final norm of the last step, for the MTP layer."""
        self._keeps_normed = False
        self.fused = _fused(self, weights)

    def forward(self, step: Step, caches: Sequence[KvCache] | None = None) -> Tensor:
        """fp32 [logit rows, vocabulary] on rank 0; empty on other ranks."""
        if not program.is_recording():
            step = step.trimmed()
            self._check(step)
        if self.fused is not None and caches is not None:
            return self.fused(step, caches)
        return self.stage.leave(self, self.forward_hidden(step, caches), step)

    def prepare(
        self, max_rows: int, steps: Iterable[Step], caches: Sequence[KvCache], then: Iterable[Callable[[], object]] = ()
    ) -> None:
        """Compiles the kernels of these steps, and of steps of up to so many rows, where that takes time."""
        if self.fused is not None:
            self.fused.prepare(max_rows, steps, caches, then)

    def forward_hidden(self, step: Step, caches: Sequence[KvCache] | None = None) -> Tensor:
        """[rows, hidden]: the output of the last layer (of this stage), before the final norm, for a step without padding."""
        x = self.stage.enter(self, step)
        for index, layer in enumerate(self.layers):
            x = layer(x, step, None if caches is None else caches[index])
        return x

    def embedded(self, step: Step) -> Tensor:
        """The input of the first layer."""
        x = self.vocabulary.embedded(step.tokens, self.table, self.dtype)
        if self.position_table is not None:
            x = add(x, embed(step.positions, self.position_table, self.dtype))
        return x if self.embed_norm is None else self.embed_norm(x)

    def keep_normed(self, max_rows: int, device: str) -> None:
        """On a device, where steps are replayed: hidden states are copied to one place."""
        self.normed = torch.zeros(max_rows, self.spec.hidden_size, dtype=self.dtype, device=device)
        self._keeps_normed = True
        if self.fused is not None:
            self.fused.hidden = self.normed

    def _keep(self, normed: Tensor) -> None:
        if self._keeps_normed and self.normed is not None:
            self.normed[: normed.shape[0]] = normed
        else:
            self.normed = normed

    def step_logits(self, hidden: Tensor, step: Step) -> Tensor:
        if self.mtp is not None:
            normed = hidden if self.norm is None else self.norm(hidden)
            self._keep(normed)
            with program.rows_counted_by(step.counts[2:3]):
                return self.vocabulary.logits(gather(normed, step.logit_rows), self.head, step.candidates)
        with program.rows_counted_by(step.counts[2:3]):
            return self.logits(gather(hidden, step.logit_rows), step.candidates)

    def logits(self, hidden: Tensor, candidates: Tensor | None = None) -> Tensor:
        if self.norm is not None:
            hidden = self.norm(hidden)
        return self.vocabulary.logits(hidden, self.head, candidates)

    def make_caches(self, num_blocks: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> list[KvCache]:
        return [layer.mixer.make_cache(num_blocks, dtype, device) for layer in self.layers]

    def _check(self, step: Step) -> None:
        """On the CPU only: on a GPU this would synchronize, and the scheduler has checked the lengths."""
        if step.positions.device.type == "cpu" and step.positions.numel():
            longest = int(step.positions.max()) + 1
            if longest > self.context_tokens:
                raise BadInput(
                    f"a sequence of {longest} tokens exceeds the context of {self.context_tokens} tokens; shorten it, or raise the context"
                )


def _fused(decoder: Decoder, weights: Weights) -> FusedPass | None:
    """The fused forward pass, if weights are in the tile layout of runtime/kernels/cuda."""
    if not getattr(weights, "tiled", False):
        return None
    if not decoder.shard.has_whole_layers:
        raise Impossible("weights in tile layout need whole layers on one GPU; load them without tiles, or split by --pp alone")
    from windlass.runtime.nn.fused.decoder import FusedDecoder

    return FusedDecoder(decoder)


def _context(spec: model.ModelSpec, requested: int | None) -> int:
    """The requested context, or the model's; never more than is supported here."""
    limit, why = _limit(spec)
    if requested is None:
        return min(spec.context_tokens, limit)
    if requested > limit:
        raise Impossible(f"a context of {requested} tokens exceeds this model's limit of {limit} ({why}); request less")
    return requested


def _limit(spec: model.ModelSpec) -> tuple[int, str]:
    """Learned position tables are finite. Sparse attention equals dense attention as long as its indexer picks every token."""
    if isinstance(spec.positions, model.LearnedPositions):
        return spec.positions.max_positions, "learned position embeddings"
    mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, model.LatentAttention)]
    picked = [mixer.indexer.top_k for mixer in mixers if mixer.indexer is not None]
    return min(picked, default=sys.maxsize), "sparse attention is not implemented"
