"""The MTP layer (nn/mtp.py) in the kernels of the fused pass: the same weights and the same mathematics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from windlass.core.fused import ONE_ROW_WIDTH
from windlass.errors import Impossible
from windlass.kernels.cuda import driver, linear
from windlass.kernels.cuda.layout import Tiles
from windlass.kernels.step import KvCache, Step
from windlass.nn.fused.decoder import (
    BACKENDS,
    DEPENDENT_ROWS,
    MAX_ROWS,
    AttentionLaunch,
    FusedDecoder,
    FusedLayer,
    ResidualStream,
)
from windlass.nn.fused.feed_forward import wide_product
from windlass.nn.layer import DecoderLayer
from windlass.nn.moe import MixtureOfExperts
from windlass.nn.mtp import MtpLayer


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

    def __call__(self, hidden: Tensor, step: Step, caches: Sequence[KvCache]) -> tuple[Tensor, Tensor]:
        """The layer's hidden states bf16 [rows, width] after its norm, and fp32 [logit rows, vocabulary]; `hidden` of the step's rows."""
        (cache,), rows = caches, step.tokens.shape[0]
        embedded = torch.nn.functional.embedding(step.tokens, self._fused.decoder.table).to(torch.bfloat16)
        joined = self._mtp.joined(hidden, embedded, step)
        with driver.dependent_launches(rows <= DEPENDENT_ROWS), sdpa_kernel(BACKENDS, set_priority=True):
            x = self._hidden(joined, cache, self._fused.space(step))
            chosen = x if step.logit_rows.shape[0] == rows else x[step.logit_rows]
            return x, wide_product(chosen, self._fused.decoder.head)

    def _projected(self, joined: Tensor) -> ResidualStream:
        """Quantizers often leave the projection as it is."""
        if isinstance(self._project, Tensor):
            return ResidualStream(wide_product(joined, self._project), self._fused.eps)
        shape, rows = (joined.shape[0], self._project.rows), joined.shape[0]
        if rows == 1:
            h = torch.empty(shape, dtype=torch.float32, device=joined.device)
            linear.linear_one(joined[0], self._project, h[0])
            return ResidualStream(h, self._fused.eps)
        start = torch.zeros(shape, dtype=torch.float32, device=joined.device)
        return ResidualStream(start, self._fused.eps, parts=linear.linear_parts(joined, self._project))

    def _hidden(self, joined: Tensor, cache: KvCache, space: AttentionLaunch) -> Tensor:
        rows, weight, eps = joined.shape[0], self._mtp.norm.weight, self._fused.eps
        stream = self._projected(joined)
        if rows == 1 and stream.h.shape[1] <= ONE_ROW_WIDTH:
            self._layer.one(stream.h[0], cache, space)
            return ResidualStream(stream.h, eps).normed(weight)
        (self._layer.several if rows <= MAX_ROWS else self._layer.wide)(stream, cache, space)
        return stream.normed(weight)
