"""Writes metrics for TensorBoard, an optional package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from windlass.errors import MissingExtra
from windlass.tasks.train.logging.fan_out import StepMetrics

NAMES = ("loss", "learning_rate", "grad_norm", "tokens_per_second", "mfu", "expert_balance_cv")


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtra("tensorboard", "tensorboard", "writing for TensorBoard") from None
        self._writer = SummaryWriter(str(folder))

    def sample(self, sample: StepMetrics) -> None:
        for name in NAMES:
            value = getattr(sample, name)
            if value is not None:
                self._writer.add_scalar(f"training/{name}", value, sample.step)
        for name, value in sample.parts.items():
            self._writer.add_scalar(f"training/loss_{name}", value, sample.step)

    def event(self, kind: str, values: Mapping[str, Any]) -> None:
        if kind == "validation":
            self._writer.add_scalar("validation/loss", values["loss"], values["step"])
        else:
            self._writer.add_text(kind, ", ".join(f"{name} {value}" for name, value in values.items()), values.get("step"))

    def close(self) -> None:
        self._writer.close()
