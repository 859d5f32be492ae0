"""The decoder of every family: tokens in, logits out. What a family is, its ModelSpec says; nothing here asks for its name.

A call works on a `Step`: tokens of several sequences, one after another in rows, each with its position and its place in the
caches. `decoder(step, caches)` serves; `decoder(step)` needs no cache, sees each sequence whole and lets gradients through.

A rank of several has a `Shard` of it: its layers, and of these its heads, channels and experts. All ranks are called with the same steps.

The forward pass only calls operations of `kernels` and takes views, because on the CPU it is recorded once and replayed without
Python. Whatever depends on the model alone is computed when the decoder is built.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from windlass.core import model
from windlass.core.ports import Weights
from windlass.errors import BadInput, Impossible
from windlass.kernels.ops.gather import gather
from windlass.kernels.ops.linear import embed
from windlass.kernels.ops.norm import add
from windlass.kernels.program import program
from windlass.kernels.step import KvCache, Step
from windlass.nn.layer import Layer
from windlass.nn.linear import held
from windlass.nn.mixers.positions import Rotary
from windlass.nn.norm import Norm
from windlass.nn.parallel.shard import WHOLE, Shard
from windlass.nn.parallel.stage import stage_of
from windlass.nn.parallel.vocabulary import vocabulary_of


class Decoder(nn.Module):
    def __init__(
        self, spec: model.ModelSpec, weights: Weights, context_tokens: int | None = None, *, shard: Shard = WHOLE
    ) -> None:
        """`context_tokens`: no sequence will be longer; by default as long as the model allows. `weights` are those of the shard."""
        super().__init__()
        self.spec, self.dtype = spec, weights.dtype
        self.logit_dtype = torch.promote_types(weights.dtype, torch.float32)
        self.context_tokens = _context(spec, context_tokens)
        self.shard, self.stage, self.vocabulary = shard, stage_of(shard), vocabulary_of(shard, spec.vocab_size)
        has_table = shard.is_first or (shard.is_last and spec.tied_head)
        self.table = held(weights.matrix("embed.weight")) if has_table else None
        learned = isinstance(spec.positions, model.LearnedPositions) and shard.is_first
        self.position_table = held(weights.matrix("positions.weight")) if learned else None
        self.embed_norm = Norm(spec.norm, weights, "embed_norm") if spec.embedding_norm and shard.is_first else None
        rotary = Rotary(spec.positions, self.context_tokens, weights) if isinstance(spec.positions, model.Rope) else None
        self.layers = nn.ModuleList(Layer(spec, index, weights, rotary, shard) for index in range(*shard.layers(spec)))
        self.norm = Norm(spec.norm, weights, "norm") if spec.final_norm and shard.is_last else None
        has_head = shard.is_last and not spec.tied_head
        self.head = held(weights.matrix("head.weight")) if has_head else self.table
        self.fused = _fused(self, weights)

    def forward(self, step: Step, caches: Sequence[KvCache] | None = None) -> Tensor:
        """fp32 [logit rows, vocabulary]; of several ranks, on the first alone, and nothing elsewhere."""
        if not program.is_recording():
            step = step.trimmed()
            self._check(step)
        if self.fused is not None and caches is not None:
            return self.fused(step, caches)
        return self.stage.leave(self, self.forward_hidden(step, caches), step)

    def forward_hidden(self, step: Step, caches: Sequence[KvCache] | None = None) -> Tensor:
        """What the last layer (here) leaves in every row of a step without padding, before the final norm: [rows, hidden]."""
        x = self.stage.enter(self, step)
        for index, layer in enumerate(self.layers):
            x = layer(x, step, None if caches is None else caches[index])
        return x

    def embedded(self, step: Step) -> Tensor:
        """What the first layer is given."""
        x = self.vocabulary.embedded(step.tokens, self.table, self.dtype)
        if self.position_table is not None:
            x = add(x, embed(step.positions, self.position_table, self.dtype))
        return x if self.embed_norm is None else self.embed_norm(x)

    def wanted_logits(self, hidden: Tensor, step: Step) -> Tensor:
        with program.rows_counted_by(step.counts[2:3]):
            return self.logits(gather(hidden, step.logit_rows), step.candidates)

    def logits(self, hidden: Tensor, candidates: Tensor | None = None) -> Tensor:
        if self.norm is not None:
            hidden = self.norm(hidden)
        return self.vocabulary.logits(hidden, self.head, candidates)

    def make_caches(self, num_blocks: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> list[KvCache]:
        return [layer.mixer.make_cache(num_blocks, dtype, device) for layer in self.layers]

    def _check(self, step: Step) -> None:
        """On the CPU only: elsewhere looking would mean waiting for the device, and whoever made the step knows the lengths."""
        if step.positions.device.type == "cpu" and step.positions.numel():
            longest = int(step.positions.max()) + 1
            if longest > self.context_tokens:
                raise BadInput(
                    f"a sequence of {longest} tokens, where this decoder was made for {self.context_tokens}: shorten it"
                )


def _fused(decoder: Decoder, weights: Weights) -> Callable[[Step, Sequence[KvCache]], Tensor] | None:
    """Where matrices lie as a GPU's own kernels want them, those make the whole pass."""
    if not getattr(weights, "tiled", False):
        return None
    if not decoder.shard.is_whole:
        raise Impossible(
            "weights in tiles are for kernels that run a whole model on one GPU; load them without, or do not split it"
        )
    from windlass.nn.fused.decoder import FusedDecoder

    return FusedDecoder(decoder)


def _context(spec: model.ModelSpec, wanted: int | None) -> int:
    """As many tokens as are asked for, or as the model allows; never more than can be computed here."""
    limit, why = _limit(spec)
    if wanted is None:
        return min(spec.context_tokens, limit)
    if wanted > limit:
        raise Impossible(
            f"a context of {wanted} tokens, where this model goes no further than {limit} here ({why}): ask for less"
        )
    return wanted


def _limit(spec: model.ModelSpec) -> tuple[int, str]:
    """Tables of learned positions end. Sparse attention is dense, and so exact, as long as its indexer picks every token."""
    if isinstance(spec.positions, model.LearnedPositions):
        return spec.positions.max_positions, "its positions are learned"
    mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, model.LatentAttention)]
    picked = [mixer.indexer.top_k for mixer in mixers if mixer.indexer is not None]
    return min(picked, default=sys.maxsize), "sparse attention is not built in"
