"""The sections of a recipe that only a trainer reads: how weights are moved, which losses there are, what is kept and looked at.

Values with what they mean, and nothing that is worked out from them. `core.recipe` puts them beside the sections that planning reads.
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
    """`muon` moves matrices by Muon and everything else (tables, head, norms, biases, routers) by AdamW."""
    lr: float = 3e-4
    """At its highest; `schedule` says when that is."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Of AdamW's two moments (arXiv 2412.19437, 4.2, and others)."""
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Of matrices; vectors and tables of tokens do not decay."""
    clip: float | None = 1.0
    """The gradient's norm, over all weights of all ranks, is brought down to this."""
    momentum: float = 0.95
    """Muon's, and that of `sgd`."""
    newton_schulz_steps: int = 5
    """Muon's iterations towards an orthogonal matrix (github.com/KellerJordan/Muon)."""


class ScheduleSection(Frozen):
    """How the learning rate goes: up from 0 in `warmup_steps`, then as `name` says, to `final` of the highest."""

    name: ScheduleName = "cosine"
    steps: int | None = None
    """Of the whole run; without them, as many as `data.tokens` take."""
    warmup_steps: int = 0
    decay_steps: int | None = None
    """`wsd` alone: the last so many steps go down (arXiv 2404.06395, 4.2); a tenth of all where it is not said."""
    final: float = 0.1
    """Of the highest rate, at the end."""


class LossSection(Frozen):
    """What is added to the cross-entropy, and how the router's correction moves. Defaults after GLM-4.5's report (arXiv 2508.06471, 2.3)."""

    mtp: float = 0.3
    """Weight of the multi-token-prediction layer's loss, where `model.mtp` trains one."""
    z: float = 0.0
    """Weight of the squared log of the softmax's denominator, of the head (arXiv 2204.02311, 5)."""
    router_z: float = 0.0
    """The same of routers (arXiv 2202.08906, 3.2)."""
    balance: float = 1e-4
    """Weight of the sequence-wise balance loss (arXiv 2412.19437, 2.1.2)."""
    bias_rate: float = 1e-3
    """How far a router's correction moves in a step, where it has one (arXiv 2408.15664); 0 leaves it."""


class LoraSection(Frozen):
    """Adapters beside frozen weights (arXiv 2106.09685)."""

    rank: int | None = None
    """None: there are none, all weights learn."""
    alpha: float = 32.0
    """What adapters say is multiplied with alpha / rank."""
    targets: tuple[LoraTarget, ...] = ("attention",)
    """`feed_forward` means dense and shared ones."""
    base: LoraBase = "bf16"
    """How the frozen weights are held, for planning; a run takes them as the model's files have them."""


class ValidationSection(Frozen):
    interval_steps: int | None = None
    """None: never."""
    samples: int = 64
    """Rows of held-out data that are looked at each time."""


class GuardSection(Frozen):
    """When a step must not stand: the run goes back to its last checkpoint and leaves that step's samples out."""

    spike: float = 8.0
    """How far above the last steps' median a loss may lie, in robust standard deviations; 0: only what is no number is bad."""
    window: int = 64
    """Steps that a loss is compared with."""
    rollbacks: int = 8
    """In a row, before the run gives up."""


class RunSection(Frozen):
    """What concerns the running rather than the learning."""

    engine: EngineName = "torch"
    deepspeed: str | None = None
    """DeepSpeed's own JSON, seen from the recipe's folder."""
    compile: bool = False
    """Small chains of operations become one kernel each (torch.compile). Pays on GPUs."""
    seed: int = 0
    """Of the first weights. The order of samples has `data.seed`."""
    folder: str | None = None
    """Where checkpoints and the log go, seen from the recipe's folder; by default one of the recipe's name beside it."""
