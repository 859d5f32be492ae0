"""The MTP layer as a decoder of its own, for a Runner: hidden states and the tokens after them in, logits out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from windlass.core.model import ModelSpec
from windlass.runtime.kernels.ops.gather import gather
from windlass.runtime.kernels.program import program
from windlass.runtime.kernels.step import KvCache, Step
from windlass.runtime.nn.mtp import MtpLayer


class MtpDecoder(Protocol):
    """What the layer uses of the decoder it belongs to."""

    spec: ModelSpec
    dtype: torch.dtype
    vocabulary: Any
    head: Any
    fused: Any
    normed: Tensor | None

    def embedded(self, step: Step) -> Tensor: ...


class MtpPass:
    def __init__(self, decoder: MtpDecoder, layer: MtpLayer, max_rows: int, device: torch.device | str) -> None:
        self._decoder, self.layer = decoder, layer
        self._fused = _fused(decoder, layer)
        self.head: Any = decoder.head
        self.inputs = torch.zeros(max_rows, decoder.spec.hidden_size, dtype=decoder.dtype, device=device)
        """Hidden states of the rows: filled before a step."""
        self.outputs = self.inputs[:0]
        """The layer's own, of the last step: inputs of the next draft."""

    def __call__(self, step: Step, caches: Sequence[KvCache]) -> Tensor:
        if not program.is_recording():
            step = step.trimmed()
        if self._fused is not None:
            self.outputs, logits = self._fused(self.inputs[: step.tokens.shape[0]], step, caches)
            return logits
        embedded = self._decoder.embedded(step)
        self.outputs = self.layer.serve(self.inputs[: embedded.shape[0]], embedded, step, caches)
        with program.rows_counted_by(step.counts[2:3]):
            return self._decoder.vocabulary.logits(gather(self.outputs, step.logit_rows), self.head)

    def after(self, step: Step, caches: Sequence[KvCache]) -> Tensor:
        """In the same step as the model, whose hidden states are used where they are: logits of all rows."""
        assert self._decoder.normed is not None
        given, self.inputs = self.inputs, self._decoder.normed
        try:
            return self(step, caches)
        finally:
            self.inputs = given


def _fused(decoder: MtpDecoder, layer: MtpLayer) -> Any:
    """In the fused pass, if its weights are in the same layout as the decoder's."""
    if decoder.fused is None:
        return None
    from windlass.runtime.nn.fused.mtp import FusedMtp, is_tiled

    return FusedMtp(decoder.fused, layer) if is_tiled(layer.layer) else None
