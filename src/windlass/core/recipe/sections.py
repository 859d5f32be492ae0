"""The sections of a recipe that mainly the trainer reads: optimizer, schedule, losses, LoRA, validation, guard, run.

Plain values; `core.recipe.recipe` has the sections that planning reads.
"""

from __future__ import annotations

from typing import Literal

from windlass.core.model import Frozen

ScheduleName = Literal["constant", "cosine", "wsd", "linear"]
OptimizerName = Literal["adamw", "muon", "sgd"]
EngineName = Literal["torch", "deepspeed"]
LoraTarget = Literal["attention", "feed_forward", "experts"]
LoraBase = Literal["bf16", "int8", "int4"]


class OptimizerSection(Frozen):
    name: OptimizerName = "adamw"
    """`muon`: Muon for matrices, AdamW for the rest (embeddings, head, norms, biases, routers)."""
    lr: float = 3e-4
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW betas (arXiv 2412.19437, 4.2, and others)."""
    eps: float = 1e-8
    weight_decay: float = 0.1
    """For matrices; vectors and embeddings do not decay."""
    clip: float | None = 1.0
    """Maximum global gradient norm; None: no clipping."""
    momentum: float = 0.95
    """Momentum of `muon` and `sgd`."""
    newton_schulz_steps: int = 5
    """Newton-Schulz iterations of Muon (github.com/KellerJordan/Muon)."""


class ScheduleSection(Frozen):
    """Learning-rate schedule: linear warmup for `warmup_steps`, then `name`, down to `final` of the peak."""

    name: ScheduleName = "cosine"
    steps: int | None = None
    """Total optimizer steps; None: derived from `data.tokens`."""
    warmup_steps: int = 0
    decay_steps: int | None = None
    """For `wsd` only: length of the final decay (arXiv 2404.06395, 4.2); default: a tenth of all steps."""
    final: float = 0.1
    """Final learning rate, as a fraction of the peak."""


class LossSection(Frozen):
    """Auxiliary losses and the router bias update. Defaults after GLM-4.5's report (arXiv 2508.06471, 2.3)."""

    mtp: float = 0.3
    """Weight of the multi-token-prediction loss, with `model.mtp`."""
    z: float = 0.0
    """Weight of the z-loss of the output logits (arXiv 2204.02311, 5)."""
    router_z: float = 0.0
    """Weight of the router z-loss (arXiv 2202.08906, 3.2)."""
    balance: float = 1e-4
    """Weight of the sequence-wise balance loss (arXiv 2412.19437, 2.1.2)."""
    bias_rate: float = 1e-3
    """Update rate of the router's correction bias, if it has one (arXiv 2408.15664); 0: no update."""


class LoraSection(Frozen):
    """LoRA adapters on frozen weights (arXiv 2106.09685)."""

    rank: int | None = None
    """None: no LoRA, all weights are trained."""
    alpha: float = 32.0
    """Adapter outputs are scaled by alpha / rank."""
    targets: tuple[LoraTarget, ...] = ("attention",)
    """`feed_forward`: dense feed-forwards and shared experts."""
    base: LoraBase = "bf16"
    """Storage of the frozen weights, for planning; a run uses them as stored in the model's files."""


class ValidationSection(Frozen):
    interval_steps: int | None = None
    """None: never."""
    samples: int = 64
    """Held-out rows per validation."""


class GuardSection(Frozen):
    """Loss-spike guard: on a bad step the run rolls back to its last checkpoint and skips that step's samples."""

    spike: float = 8.0
    """Maximum robust z-score of the loss against recent steps; 0: only NaN and infinity are bad."""
    window: int = 64
    """Recent steps to compare with."""
    rollbacks: int = 8
    """Maximum consecutive rollbacks before the run fails."""


class RunSection(Frozen):
    """Engine, compilation, seed and output folder."""

    engine: EngineName = "torch"
    deepspeed: str | None = None
    """DeepSpeed JSON config, relative to the recipe."""
    compile: bool = False
    """Fuse small chains of operations with torch.compile. Useful on GPUs."""
    seed: int = 0
    """Seed of the initial weights. `data.seed` is for the sample order."""
    folder: str | None = None
    """Directory of checkpoints and logs, relative to the recipe; default: `<recipe>-run` beside it."""
