"""The multi-token-prediction (MTP) layer: from the hidden state of a token and the token that followed it, the token after that
(arXiv 2412.19437, 2.2). Embedding and head are those of the model: some checkpoints have copies of them, others have none.

The hidden state is the one after the final norm. So is the layer's own, after its norm (`shared_head.norm`): it takes the place of the
model's for a second draft. The embedding at position 0 is zero, as in vLLM's glm4_moe_mtp.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor, nn

from windlass.core.model import ModelSpec
from windlass.core.ports import Weights
from windlass.runtime.kernels.program import program
from windlass.runtime.kernels.step import KvCache, Step
from windlass.runtime.nn.layer import DecoderLayer
from windlass.runtime.nn.linear import Linear
from windlass.runtime.nn.mixers.positions import Rotary
from windlass.runtime.nn.norm import NormLayer
from windlass.runtime.nn.parallel.shard import WHOLE, ModelShard

RunLayer = Callable[[nn.Module, Tensor, Step], Tensor]


class MtpLayer(nn.Module):
    def __init__(self, spec: ModelSpec, weights: Weights, rotary: Rotary | None, shard: ModelShard = WHOLE) -> None:
        super().__init__()
        assert spec.next_token is not None
        name = f"layers.{spec.num_layers}"
        longer = msgspec.structs.replace(spec, layers=(*spec.layers, spec.next_token.layer))
        self.embed_norm, self.hidden_norm, self.norm = (
            NormLayer(spec.norm, weights, f"{name}.next.{part}") for part in ("embed_norm", "hidden_norm", "norm")
        )
        self.project = Linear(weights, f"{name}.next.project")
        self.layer = DecoderLayer(longer, spec.num_layers, weights, rotary, shard)

    def forward(self, hidden: Tensor, embedded: Tensor, step: Step, run: RunLayer) -> Tensor:
        """`hidden` [rows, width] of the step's tokens after the final norm, `embedded` of the tokens that follow them. Without a cache."""
        return self.norm(run(self.layer, self.project(self.joined(hidden, embedded, step)), step))

    def serve(self, hidden: Tensor, embedded: Tensor, step: Step, caches: Sequence[KvCache]) -> Tensor:
        """The same over its cache."""
        (cache,) = caches
        return self.norm(self.layer(self.project(self.joined(hidden, embedded, step)), step, cache))

    def make_cache(self, num_blocks: int, dtype: torch.dtype, device: str) -> KvCache:
        return self.layer.mixer.make_cache(num_blocks, dtype, device)

    def joined(self, hidden: Tensor, embedded: Tensor, step: Step) -> Tensor:
        """[rows, 2 * width]: the embedding first."""
        embedded, hidden = self.embed_norm(embedded), self.hidden_norm(hidden)
        if not program.is_recording():
            return torch.cat((embedded * (step.positions != 0)[:, None], hidden.to(embedded.dtype)), dim=-1)
        joined = program.empty((embedded.shape[0], 2 * embedded.shape[1]), embedded.dtype)
        program.call(_join, embedded, hidden, step.positions, joined)
        return joined


def _join(embedded: Tensor, hidden: Tensor, positions: Tensor, joined: Tensor) -> None:
    """In NumPy: PyTorch's threads would compete with those of the kernels, which keep spinning."""
    width, out = embedded.shape[1], joined.numpy()
    out[:, :width] = embedded.numpy() * (positions.numpy() != 0)[:, None]
    out[:, width:] = hidden.numpy()
