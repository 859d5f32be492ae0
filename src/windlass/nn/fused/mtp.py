"""The MTP layer (nn/mtp.py) in the kernels of the fused pass: the same weights and the same mathematics."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

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
from windlass.nn.mtp import MtpLayer


class FusedMtp:
    def __init__(self, fused: FusedDecoder, layer: MtpLayer) -> None:
        self._fused, self._mtp = fused, layer
        self._layer = FusedLayer(layer.layer, fused.eps)
        self._project: Tiles = layer.project.weight

    def __call__(self, hidden: Tensor, step: Step, caches: Sequence[KvCache]) -> tuple[Tensor, Tensor]:
        """The layer's hidden states bf16 [rows, width] after its norm, and fp32 [logit rows, vocabulary]; `hidden` of the step's rows."""
        (cache,), rows = caches, step.tokens.shape[0]
        embedded = torch.nn.functional.embedding(step.tokens, self._fused.decoder.table).to(torch.bfloat16)
        joined = self._mtp.joined(hidden, embedded, step)
        with driver.dependent_launches(rows <= DEPENDENT_ROWS), sdpa_kernel(BACKENDS, set_priority=True):
            x = self._hidden(joined, cache, self._fused.space(step))
            chosen = x if step.logit_rows.shape[0] == rows else x[step.logit_rows]
            return x, wide_product(chosen, self._fused.decoder.head)

    def _hidden(self, joined: Tensor, cache: KvCache, space: AttentionLaunch) -> Tensor:
        rows, weight, eps = joined.shape[0], self._mtp.norm.weight, self._fused.eps
        if rows == 1:
            h = torch.empty(self._project.rows, dtype=torch.float32, device=joined.device)
            linear.linear_one(joined[0], self._project, h)
            self._layer.one(h, cache, space)
            return ResidualStream(h[None], eps).normed(weight)
        start = torch.zeros(rows, self._project.rows, dtype=torch.float32, device=joined.device)
        stream = ResidualStream(start, eps, parts=linear.linear_parts(joined, self._project))
        (self._layer.several if rows <= MAX_ROWS else self._layer.wide)(stream, cache, space)
        return stream.normed(weight)
