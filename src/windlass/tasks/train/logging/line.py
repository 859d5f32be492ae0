"""Progress on standard error: a live line in a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from windlass.tasks.train.logging.fan_out import StepMetrics
from windlass.units import format_count, format_rate, format_seconds

EVERY_SECONDS = 10.0
"""Between lines without a terminal."""


class LiveLine:
    def __init__(self, every_seconds: float = EVERY_SECONDS) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())
        self._live = Live(console=self._console, refresh_per_second=4, transient=False) if sys.stderr.isatty() else None
        if self._live is not None:
            self._live.start()
        self._every, self._printed, self._last = every_seconds, float("-inf"), ""

    def sample(self, sample: StepMetrics) -> None:
        self._last = metrics_text(sample)
        if self._live is not None:
            self._live.update(Text(self._last, no_wrap=True, overflow="ellipsis"))
        elif time.monotonic() - self._printed >= self._every:
            self._print()

    def event(self, kind: str, values: Mapping[str, Any]) -> None:
        text = event_text(kind, values)
        if text:
            self._console.print(Text(text))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
        elif self._last:
            self._print()

    def _print(self) -> None:
        self._console.print(Text(self._last))
        self._printed, self._last = time.monotonic(), ""


def metrics_text(sample: StepMetrics) -> str:
    parts = [f"step {sample.step:,}" + (f"/{sample.steps:,}" if sample.steps else ""), f"loss {sample.loss:.4f}"]
    if sample.validation_loss is not None:
        parts.append(f"validation {sample.validation_loss:.4f}")
    parts.append(f"{format_rate(sample.tokens_per_second)} tokens/s")
    if sample.mfu is not None:
        parts.append(f"MFU {sample.mfu:.1%}")
    parts += [f"grad norm {sample.grad_norm:.3g}", f"lr {sample.learning_rate:.2e}"]
    if sample.expert_balance_cv is not None:
        parts.append(f"balance CV {sample.expert_balance_cv:.2f}")
    parts.append(f"{format_count(sample.tokens)} tokens")
    if sample.seconds_left:
        parts.append(f"{format_seconds(sample.seconds_left)} left")
    return " · ".join(parts)


def event_text(kind: str, values: Mapping[str, Any]) -> str:
    if kind == "validation":
        return f"step {values['step']:,}: validation loss {values['loss']:.4f}"
    if kind == "rollback":
        return f"rolled back to step {values['to_step']:,}, skipping the samples of step {values['step']:,}: {values['why']}"
    if kind == "stop":
        return f"stopped after step {values['step']:,} ({values['why']}); continue with --resume"
    return str(values.get("text", ""))
