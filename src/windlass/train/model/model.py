"""The decoder as it learns: packed rows in, losses out. Any part of it: the whole, a rank's slices, a stage of layers.

Layers are run one by one, so that what is between them can be kept, or computed again. Knows no optimizer and no ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from windlass.core.model import ModelSpec
from windlass.core.ports import Weights
from windlass.core.recipe.recipe import Recompute
from windlass.core.recipe.sections import LossSection
from windlass.kernels.step import Step
from windlass.nn import Decoder
from windlass.nn.layer import Layer
from windlass.nn.linear import Linear
from windlass.nn.mixers.positions import Rotary
from windlass.nn.norm import Norm
from windlass.nn.parallel.shard import WHOLE, Shard
from windlass.train.model.losses import head_loss

HeadLoss = Callable[[Tensor, Any, Tensor, float], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Micro:
    """One micro-batch, on the device."""

    step: Step
    targets: Tensor
    """[rows]"""
    num_targets: int
    """Of the whole step, on all ranks."""
    following: Tensor | None = None
    """Next tokens [rows], and what comes after those: where a layer guesses ahead."""
    after: Tensor | None = None
    num_after: int = 1


@dataclass(frozen=True)
class Losses:
    objective: Tensor
    """To be differentiated; means over the whole step, so that those of all micro-batches and ranks add up."""
    entropy: Tensor
    """Cross-entropy alone, without gradient, in the same mean."""
    ahead: Tensor | None = None


class NextToken(nn.Module):
    """One more layer that guesses the token after next, from the model's last rows and the next token (arXiv 2412.19437, 2.2)."""

    def __init__(self, spec: ModelSpec, weights: Weights, rotary: Rotary | None, shard: Shard = WHOLE) -> None:
        super().__init__()
        assert spec.next_token is not None
        name = f"layers.{spec.num_layers}"
        longer = msgspec.structs.replace(spec, layers=(*spec.layers, spec.next_token.layer))
        self.embed_norm, self.hidden_norm, self.norm = (
            Norm(spec.norm, weights, f"{name}.next.{part}") for part in ("embed_norm", "hidden_norm", "norm")
        )
        self.project = Linear(weights, f"{name}.next.project")
        self.layer = Layer(longer, spec.num_layers, weights, rotary, shard)

    def forward(self, hidden: Tensor, embedded: Tensor, step: Step, run: Callable[[nn.Module, Tensor, Step], Tensor]) -> Tensor:
        joined = torch.cat((self.embed_norm(embedded), self.hidden_norm(hidden)), dim=-1)
        return self.norm(run(self.layer, self.project(joined), step))


class Trained(nn.Module):
    def __init__(
        self,
        decoder: Decoder,
        next_token: NextToken | None = None,
        *,
        loss: LossSection | None = None,
        recompute: Recompute = "none",
    ) -> None:
        super().__init__()
        self.decoder, self.next_token = decoder, next_token
        self.loss, self.recompute = loss or LossSection(), recompute
        self.head_loss: HeadLoss = head_loss

    def forward(self, micro: Micro) -> Losses:
        return self.losses(self.hidden(self.decoder.embedded(micro.step), micro.step), micro)

    def hidden(self, x: Tensor, step: Step) -> Tensor:
        if torch.is_grad_enabled() and not x.requires_grad:
            x = (
                x.detach().requires_grad_()
            )  # behind a frozen table: every layer takes the kernels that learn, which round nothing off
        for layer in self.decoder.layers:
            x = self.run(layer, x, step)
        return x

    def losses(self, hidden: Tensor, micro: Micro) -> Losses:
        normed = hidden if self.decoder.norm is None else self.decoder.norm(hidden)
        total, entropy = self.head_loss(normed, self.decoder.head, micro.targets, self.loss.z)
        objective = total / micro.num_targets
        ahead = None
        if self.next_token is not None:
            assert micro.following is not None
            embedded = self.decoder.embedded(replace(micro.step, tokens=micro.following))
            guessed = self.next_token(normed, embedded, micro.step, self.run)
            more, said = self.head_loss(guessed, self.decoder.head, micro.after, self.loss.z)
            objective = objective + self.loss.mtp * more / micro.num_after
            ahead = said / micro.num_after
        return Losses(objective, entropy / micro.num_targets, ahead)

    def run(self, layer: nn.Module, x: Tensor, step: Step) -> Tensor:
        if self.recompute == "none" or not torch.is_grad_enabled():
            return layer(x, step, None)
        how = {"context_fn": _keep_products} if self.recompute == "selective" else {}
        return checkpoint.checkpoint(layer, x, step, None, use_reentrant=False, preserve_rng_state=False, **how)


def build_model(
    spec: ModelSpec,
    weights: Weights,
    context_tokens: int,
    *,
    mtp: bool = False,
    loss: LossSection | None = None,
    recompute: Recompute = "none",
    shard: Shard = WHOLE,
) -> Trained:
    decoder = Decoder(spec, weights, context_tokens, shard=shard)
    next_token = None
    if mtp and spec.next_token is not None and shard.is_last:
        rotary = getattr(decoder.layers[0].mixer, "rotary", None)
        next_token = NextToken(spec, weights, rotary, shard)
    return Trained(decoder, next_token, loss=loss, recompute=recompute)


def _keep_products() -> Any:
    """What costs arithmetic is kept (products, attention); what costs only a pass over memory is made again."""
    return checkpoint.create_selective_checkpoint_contexts(_policy)


_KEPT = (
    "mm", "addmm", "bmm", "_grouped_mm", "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention_for_cpu", "_flash_attention_forward",
)  # fmt: skip


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    kept = getattr(operator, "overloadpacket", None) in {getattr(torch.ops.aten, name) for name in _KEPT}
    return checkpoint.CheckpointPolicy.MUST_SAVE if kept else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
