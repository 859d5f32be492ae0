"""The MTP layer (runtime/nn/mtp.py) in the kernels of the fused pass: the same weights and the same mathematics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from windlass.errors import Impossible
from windlass.runtime.kernels.cuda import driver, linear
from windlass.runtime.kernels.cuda.layout import Tiles
from windlass.runtime.kernels.step import KvCache, Step
from windlass.runtime.nn.fused.decoder import BACKENDS, DEPENDENT_ROWS, FusedDecoder
from windlass.runtime.nn.fused.feed_forward import wide_product
from windlass.runtime.nn.fused.layer import MAX_ROWS, AttentionLaunch, FusedLayer, ResidualStream
from windlass.runtime.nn.layer import DecoderLayer
from windlass.runtime.nn.moe import MixtureOfExperts
from windlass.runtime.nn.mtp import MtpLayer


def is_tiled(layer: DecoderLayer) -> bool:
    """Whether the fused pass can run it: a checkpoint may store the MTP layer in another form than the rest."""
    feed: Any = layer.feed_forward
    matrices = [layer.mixer.qkv.weight, layer.mixer.o.weight]
    matrices += [feed.gate_up, feed.down] if isinstance(feed, MixtureOfExperts) else [feed.up.weight, feed.down.weight]
    shared = getattr(feed, "shared", None)
    matrices += [] if shared is None else [shared.up.weight, shared.down.weight]
    tiled = {isinstance(matrix, Tiles) for matrix in matrices}
    if len(tiled) > 1:
        raise Impossible("the MTP layer is stored partly in int4 and partly in another form; choose --speculate ngram")
    return tiled.pop()


class FusedMtp:
    def __init__(self, fused: FusedDecoder, layer: MtpLayer) -> None:
        self._fused, self._mtp = fused, layer
        self._layer = FusedLayer(layer.layer, fused.eps)
        self._project: Tiles | Tensor = layer.project.weight
        self._most_few = max(rows for rows in range(1, linear.FEW_ROWS + 1) if self._takes_few(rows))

    def __call__(self, hidden: Tensor, step: Step, caches: Sequence[KvCache]) -> tuple[Tensor, Tensor]:
        """The layer's hidden states bf16 [rows, width] after its norm, and fp32 [logit rows, vocabulary]; `hidden` of the step's rows."""
        (cache,), rows = caches, step.tokens.shape[0]
        embedded = torch.nn.functional.embedding(step.tokens, self._fused.decoder.table).to(torch.bfloat16)
        joined = self._mtp.joined(hidden, embedded, step)
        with driver.dependent_launches(rows <= DEPENDENT_ROWS), sdpa_kernel(BACKENDS, set_priority=True):
            x = self._hidden(joined, cache, self._fused.space(step))
            chosen = x if step.logit_rows.shape[0] == rows else x[step.logit_rows]
            return x, self._logits(chosen)

    def _takes_few(self, rows: int) -> bool:
        is_projected = not isinstance(self._project, Tiles) or linear.takes_few(self._project, rows, budget=linear.FINAL_BUDGET)
        return is_projected and self._layer.takes_few(rows)

    def _logits(self, x: Tensor) -> Tensor:
        head, rows = self._fused.draft_head, x.shape[0]
        if head is None or not 0 < rows <= linear.FEW_ROWS:
            return wide_product(x, self._fused.decoder.head)
        return linear.linear_few(x, head, torch.empty(rows, head.rows, dtype=torch.float32, device=x.device))

    def _projected(self, joined: Tensor) -> ResidualStream:
        """Quantizers often leave the projection as it is."""
        if isinstance(self._project, Tensor):
            return ResidualStream(wide_product(joined, self._project), self._fused.eps)
        shape, rows = (joined.shape[0], self._project.rows), joined.shape[0]
        if rows <= self._most_few:
            h = torch.empty(shape, dtype=torch.float32, device=joined.device)
            return ResidualStream(linear.linear_few(joined, self._project, h), self._fused.eps)
        start = torch.zeros(shape, dtype=torch.float32, device=joined.device)
        return ResidualStream(start, self._fused.eps, parts=linear.linear_parts(joined, self._project))

    def _hidden(self, joined: Tensor, cache: KvCache, space: AttentionLaunch) -> Tensor:
        rows, stream = joined.shape[0], self._projected(joined)
        if rows <= self._most_few and self._fused.takes_few(rows, stream.h.shape[1], space):
            self._layer.few(stream.settled(self._mtp.norm.weight), cache, space)
        else:
            (self._layer.several if rows <= MAX_ROWS else self._layer.wide)(stream, cache, space)
        return stream.normed(self._mtp.norm.weight)
