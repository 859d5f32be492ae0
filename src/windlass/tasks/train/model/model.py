"""The decoder for training: packed rows in, losses out; whole, tensor-parallel or a pipeline stage.

Runs layer by layer, with optional activation checkpointing. Knows no optimizer and no ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from windlass.core.model import ModelSpec
from windlass.core.ports import Weights
from windlass.core.recipe.sections import LossSection, Recompute
from windlass.runtime.kernels.step import Step
from windlass.runtime.nn import Decoder
from windlass.runtime.nn.mtp import MtpLayer
from windlass.runtime.nn.parallel.shard import WHOLE, ModelShard
from windlass.tasks.train.model.losses import head_loss

HeadLossFunction = Callable[[Tensor, Any, Tensor, float], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch, on the device."""

    step: Step
    targets: Tensor
    """[rows]"""
    num_targets: int
    """Of the whole step, over all ranks."""
    mtp_inputs: Tensor | None = None
    """Next tokens [rows] and their targets, for the MTP layer."""
    mtp_targets: Tensor | None = None
    num_mtp_targets: int = 1


@dataclass(frozen=True)
class Losses:
    objective: Tensor
    """For backward; a mean over the whole step, so that those of all micro-batches and ranks add up."""
    entropy: Tensor
    """Cross-entropy only, without gradient, in the same mean."""
    mtp: Tensor | None = None


class TrainingModel(nn.Module):
    def __init__(
        self,
        decoder: Decoder,
        mtp: MtpLayer | None = None,
        *,
        loss: LossSection | None = None,
        recompute: Recompute = "none",
    ) -> None:
        super().__init__()
        self.decoder, self.mtp = decoder, mtp
        self.loss, self.recompute = loss or LossSection(), recompute
        self.head_loss: HeadLossFunction = head_loss

    def forward(self, micro: MicroBatch) -> Losses:
        return self.losses(self.hidden(self.decoder.embedded(micro.step), micro.step), micro)

    def hidden(self, x: Tensor, step: Step) -> Tensor:
        if torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()  # with frozen embeddings: all layers use the training kernels
        for layer in self.decoder.layers:
            x = self.run(layer, x, step)
        return x

    def losses(self, hidden: Tensor, micro: MicroBatch) -> Losses:
        normed = hidden if self.decoder.norm is None else self.decoder.norm(hidden)
        total, entropy = self.head_loss(normed, self.decoder.head, micro.targets, self.loss.z)
        objective = total / micro.num_targets
        mtp = None
        if self.mtp is not None:
            assert micro.mtp_inputs is not None and micro.mtp_targets is not None
            embedded = self.decoder.embedded(replace(micro.step, tokens=micro.mtp_inputs))
            predicted = self.mtp(normed, embedded, micro.step, self.run)
            mtp_total, mtp_entropy = self.head_loss(predicted, self.decoder.head, micro.mtp_targets, self.loss.z)
            objective = objective + self.loss.mtp * mtp_total / micro.num_mtp_targets
            mtp = mtp_entropy / micro.num_mtp_targets
        return Losses(objective, entropy / micro.num_targets, mtp)

    def run(self, layer: nn.Module, x: Tensor, step: Step) -> Tensor:
        if self.recompute == "none" or not torch.is_grad_enabled():
            return layer(x, step, None)
        options: dict[str, Any] = {"context_fn": _keep_matmuls} if self.recompute == "selective" else {}
        return checkpoint.checkpoint(layer, x, step, None, use_reentrant=False, preserve_rng_state=False, **options)


def build_model(
    spec: ModelSpec,
    weights: Weights,
    context_tokens: int,
    *,
    mtp: bool = False,
    loss: LossSection | None = None,
    recompute: Recompute = "none",
    shard: ModelShard = WHOLE,
) -> TrainingModel:
    decoder = Decoder(spec, weights, context_tokens, shard=shard)
    layer = None
    if mtp and spec.next_token is not None and shard.is_last:
        rotary = getattr(decoder.layers[0].mixer, "rotary", None)
        layer = MtpLayer(spec, weights, rotary, shard)
    return TrainingModel(decoder, layer, loss=loss, recompute=recompute)


def _keep_matmuls() -> Any:
    """Selective checkpointing: keeps matmul and attention outputs, recomputes memory-bound operations."""
    return checkpoint.create_selective_checkpoint_contexts(_policy)


_KEPT = (
    "mm", "addmm", "bmm", "_grouped_mm", "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention_for_cpu", "_flash_attention_forward",
)  # fmt: skip


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    kept = getattr(operator, "overloadpacket", None) in {getattr(torch.ops.aten, name) for name in _KEPT}
    return checkpoint.CheckpointPolicy.MUST_SAVE if kept else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
