"""Where a training run is, and the report of one step. No torch."""

from __future__ import annotations

import msgspec


class TrainingProgress(msgspec.Struct):
    """Saved in every checkpoint."""

    step: int = 0
    """Completed optimizer steps."""
    samples: int = 0
    """Index of the next sample."""
    tokens: int = 0
    """Tokens trained on."""
    seed: int = 0
    skipped: list[tuple[int, int]] = []
    """Sample ranges (first, end) that were skipped after a rollback."""
    best_validation: float | None = None
    recent: list[float] = []
    """Recent losses that the guard compares with, so that a resumed run judges the same."""


class RankTimes(msgspec.Struct, frozen=True):
    """Totals of one rank since its process began."""

    rank: int
    host: str
    steps: int
    step_seconds: float
    collective_seconds: dict[str, float]
    """By part of the step: its own wait for the others, and the wire."""


class StepReport(msgspec.Struct, frozen=True):
    step: int
    """Completed steps, this one included."""
    loss: float
    """Mean cross-entropy over the step's targets."""
    grad_norm: float
    """Before clipping."""
    lr: float
    tokens: int
    """Of this step, over all ranks."""
    seconds: float
    expert_load: list[list[int]]
    """[MoE layers, experts]: tokens routed to each expert, over all ranks."""
    parts: dict[str, float]
    """Auxiliary losses, unweighted: `mtp`, `balance`, `router_z`."""
    first_sample: int
    applied: bool
    """False: the gradient norm was NaN or infinite, and the weights were not updated."""
    ranks: tuple[RankTimes, ...] = ()
    """Of all ranks, after every tenth step, where they are measured."""
