"""Why log-probabilities of a mixture differ more under tensor parallelism than those of a dense model: near ties between experts, or a fault?

In bf16 on one CPU. What tensor parallelism changes is the rounding of sums: each rank rounds its part, and the parts are added. Here every
output of attention and of the experts is cut into two random parts that are rounded, once with the experts chosen freely, once with those
of the run without a cut.
Run: WINDLASS_NO_NATIVE=1 PYTHONPATH=src:bench/h200:bench/quality python bench/split/near_ties.py
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from prompt_rounding import whole_step
from split_model import BOUNDS, DENSE, MIXTURE, PROMPTS, made
from torch import Tensor

from windlass.runtime.nn import moe
from windlass.runtime.nn.decoder import Decoder
from windlass.runtime.weights.load.checkpoint import CheckpointWeights
from windlass.runtime.weights.source import open_model

Route = Callable[..., tuple[Tensor, Tensor]]
SEEDS = range(5)


def scores(decoder: Decoder) -> Tensor:
    """Log-probabilities of the prompts' tokens."""
    found = []
    for prompt in PROMPTS:
        logits = decoder(whole_step(prompt)).float().log_softmax(-1)
        found.append(logits[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0])
    return torch.cat(found)


class CutSum:
    """Stands in for a layer's sum over ranks: two parts of the output are rounded, added, and added to the residual stream."""

    def __init__(self, chance: torch.Generator) -> None:
        self._chance = chance

    def fused_residual(self, x: Tensor) -> None:
        del x

    def enter(self, x: Tensor) -> Tensor:
        return x

    def total(self, out: Tensor, residual: Tensor) -> Tensor:
        part = out.float() * torch.randn(out.shape, generator=self._chance)
        return residual + (part.to(torch.bfloat16) + (out.float() - part).to(torch.bfloat16)).to(residual.dtype)


class Routing:
    """Stands in for `moe.route`: notes the experts of the first run, and gives them again if asked to."""

    def __init__(self, real: Route) -> None:
        self._real, self._noted, self._next = real, list[Tensor](), 0
        self.is_noting, self.is_forced, self.others = True, False, 0

    def __call__(self, logits: Tensor, correction: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
        ids, weights = self._real(logits, correction, *rest)
        if self.is_noting:
            self._noted.append(ids)
            return ids, weights
        before = self._noted[self._next % len(self._noted)]
        self._next += 1
        self.others += int((ids.sort(-1).values != before.sort(-1).values).any(-1).sum())
        if not self.is_forced:
            return ids, weights
        chosen = logits.float().softmax(-1).gather(-1, before.long())
        return before, (chosen / chosen.sum(-1, keepdim=True)).to(weights.dtype)


def differences(config: dict[str, Any], folder: Path) -> None:
    opened = open_model(made(config, folder))
    decoder = Decoder(opened.spec, CheckpointWeights(opened, dtype=torch.bfloat16, keep_quantized=False), 512)
    routing = Routing(moe.route)
    moe.route = routing  # type: ignore[assignment]
    plain = scores(decoder)
    routing.is_noting = False
    chance = torch.Generator()
    for layer in decoder.layers:
        layer.sum = CutSum(chance)
    for forced in (False, True)[: 2 if opened.spec.experts else 1]:
        routing.is_forced, worst, others = forced, 0.0, 0
        for seed in SEEDS:
            chance.manual_seed(seed)
            routing.others = 0
            worst, others = max(worst, float((scores(decoder) - plain).abs().max())), others + routing.others
        how = (
            "same experts"
            if forced
            else f"{others / len(SEEDS):.0f} of {sum(map(len, PROMPTS)) * len(decoder.layers)} rows choose other experts"
        )
        print(
            f"{folder.name}: log-probabilities differ by {worst:.3f} at most over {len(SEEDS)} cuts; {how if opened.spec.experts else 'dense'}"
        )
    moe.route = routing._real


def main() -> int:
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        differences(DENSE, Path(folder) / "dense")
        differences(MIXTURE, Path(folder) / "mixture")
    print(f"bound on a GPU: {BOUNDS['cuda']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
