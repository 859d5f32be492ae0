"""One layer: a mixer and a feed-forward, with their norms and residual connections."""

from __future__ import annotations

from torch import Tensor, nn

from windlass.core import model
from windlass.core.model import Wiring
from windlass.core.ports import Weights
from windlass.errors import Impossible
from windlass.runtime.kernels.ops.norm import add
from windlass.runtime.kernels.step import KvCache, Step
from windlass.runtime.nn.feed_forward import FeedForward
from windlass.runtime.nn.mixers.attention import AttentionMixer
from windlass.runtime.nn.mixers.latent import LatentAttentionMixer
from windlass.runtime.nn.mixers.positions import Rotary
from windlass.runtime.nn.moe import MixtureOfExperts
from windlass.runtime.nn.norm import NormLayer
from windlass.runtime.nn.parallel.shard import WHOLE, ModelShard
from windlass.runtime.nn.parallel.sums import sum_over


class DecoderLayer(nn.Module):
    def __init__(
        self, spec: model.ModelSpec, index: int, weights: Weights, rotary: Rotary | None, shard: ModelShard = WHOLE
    ) -> None:
        super().__init__()
        layer, name = spec.layers[index], f"layers.{index}"
        self.wiring, self.sum = layer.wiring, sum_over(shard.groups.tp)
        self.mixer = _mixer(spec, layer.mixer, weights, f"{name}.mixer", rotary, shard)
        self.feed_forward = _feed_forward(layer.feed_forward, weights, index, f"{name}.ffn", shard)
        self.mixer_norm = NormLayer(spec.norm, weights, f"{name}.mixer_norm")
        if self.wiring is not Wiring.PARALLEL_ONE_NORM:
            self.ffn_norm = NormLayer(spec.norm, weights, f"{name}.ffn_norm")
        if self.wiring is Wiring.SANDWICH:
            self.mixer_post_norm = NormLayer(spec.norm, weights, f"{name}.mixer_post_norm")
            self.ffn_post_norm = NormLayer(spec.norm, weights, f"{name}.ffn_post_norm")

    def forward(self, x: Tensor, step: Step, cache: KvCache | None) -> Tensor:
        """Parallel wirings need one all-reduce, not two."""
        residual, total, enter = self.sum.fused_residual(x), self.sum.total, self.sum.enter
        match self.wiring:
            case Wiring.PRE:
                x = total(self.mixer(enter(self.mixer_norm(x)), step, cache, add=residual), x)
                return total(self.feed_forward(enter(self.ffn_norm(x)), add=self.sum.fused_residual(x)), x)
            case Wiring.SANDWICH:
                x = add(x, self.mixer_post_norm(total(self.mixer(enter(self.mixer_norm(x)), step, cache))))
                return add(x, self.ffn_post_norm(total(self.feed_forward(enter(self.ffn_norm(x))))))
            case Wiring.PARALLEL:
                beside = self.feed_forward(enter(self.ffn_norm(x)), add=residual)
                return total(self.mixer(enter(self.mixer_norm(x)), step, cache, add=beside), x)
            case Wiring.PARALLEL_ONE_NORM:
                normed = enter(self.mixer_norm(x))
                return total(self.mixer(normed, step, cache, add=self.feed_forward(normed, add=residual)), x)


def _mixer(
    spec: model.ModelSpec, mixer: model.Mixer, weights: Weights, name: str, rotary: Rotary | None, shard: ModelShard
) -> AttentionMixer | LatentAttentionMixer:
    match mixer:
        case model.Attention():
            return AttentionMixer(spec, mixer, weights, name, rotary, shard)
        case model.LatentAttention():
            assert rotary is not None, "latent attention has rotary positions"
            return LatentAttentionMixer(spec, mixer, weights, name, rotary, shard)
        case model.Convolution():
            raise Impossible("this model uses long convolutions, which can be planned but not run; choose a model with attention")


def _feed_forward(
    ffn: model.FeedForward, weights: Weights, index: int, name: str, shard: ModelShard
) -> FeedForward | MixtureOfExperts:
    match ffn:
        case model.Dense():
            return FeedForward(ffn.activation, ffn.gated, weights, name, shard)
        case model.MoE():
            return MixtureOfExperts(ffn, weights, index, name, shard)
