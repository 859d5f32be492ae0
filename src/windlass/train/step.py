"""One optimizer step's micro-batches: which samples are whose, what is counted first, forward and backward, one after another.

`Alone` is one process without others; `train.spread` has the same for many. Whatever is summed over ranks goes through these few calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from windlass.train.documents import IGNORED, after_next, step_of
from windlass.train.model import Micro, Trained
from windlass.train.slabs import Part, Slab


@dataclass(frozen=True)
class Sums:
    """Means over the whole step of what was learned, in host or device memory; of this rank's samples alone."""

    entropy: Tensor
    ahead: Tensor | None = None


class Alone:
    """Nobody else: every sum is whole."""

    dp_rank, dp_size = 0, 1
    rank = 0
    owns_losses = True

    def summed(self, numbers: Tensor) -> Tensor:
        """Over ranks that have other samples."""
        return numbers

    def summed_over_all(self, number: Tensor) -> Tensor:
        """Over every rank, of what each has a share of."""
        return number

    def run(self, model: Trained, micros: Sequence[Micro]) -> Sums:
        """Forward and backward of all micro-batches; gradients are in the parameters afterwards."""
        return run_in_turn(model, micros)

    def look(self, model: Trained, micros: Sequence[Micro]) -> Tensor:
        """Cross-entropy alone, nothing learned. Gradients are asked for and dropped, so that the same kernels run."""
        return torch.stack([model(micro).entropy for micro in micros]).sum()

    def finish(self, parameters: Mapping[str, Tensor]) -> None:
        """Gradients of ranks that have parts of them become whole."""

    def share(self, name: str) -> float | Tensor:
        """What part of a parameter's squared gradient this rank counts, where several hold it."""
        return 1.0

    def told(self, numbers: Tensor) -> Tensor:
        """Over ranks that have other samples or other layers."""
        return numbers

    def routed(self, loads: list[Tensor]) -> list[Tensor]:
        """Of all layers, in order, where stages have different ones."""
        return loads

    def places(self, slab: Slab, tensor: Tensor) -> Iterable[tuple[Part, Tensor]]:
        """A parameter, or what an optimizer keeps of it, as parts of our tensors: views."""
        return slab.split(tensor)


def run_in_turn(model: Trained, micros: Sequence[Micro], before: Callable[[Any, bool], None] | None = None) -> Sums:
    """`before` each one: the model, and whether it is the last."""
    entropies, aheads = list[Tensor](), list[Tensor]()
    for number, micro in enumerate(micros):
        if before is not None:
            before(model, number == len(micros) - 1)
        losses = model(micro)
        losses.objective.backward()
        entropies.append(losses.entropy)
        if losses.ahead is not None:
            aheads.append(losses.ahead)
    return Sums(torch.stack(entropies).sum(), torch.stack(aheads).sum() if aheads else None)


def own_samples(first: int, global_batch: int, rank: int, size: int) -> tuple[int, int]:
    """(first sample, how many) of a data-parallel rank: its run of the step's samples."""
    count = global_batch // size
    return first + rank * count, count


def micros_of(
    batches: Any, first: int, count: int, micro_batch: int, ranks: Any, device: torch.device, ahead: bool
) -> list[Micro]:
    """Samples first, first + 1... in micro-batches. Targets are counted first, on all ranks: the loss is a mean over the whole step."""
    parts = [batches.batch(start, min(micro_batch, first + count - start)) for start in range(first, first + count, micro_batch)]
    guesses = [after_next(part) if ahead else None for part in parts]
    learned = sum(int((part.targets != IGNORED).sum()) for part in parts)
    after = sum(int((guess[1] != IGNORED).sum()) for guess in guesses if guess is not None)
    totals = ranks.summed(torch.tensor([learned, after], device=device)).tolist()
    return [_micro(part, guess, totals, device) for part, guess in zip(parts, guesses, strict=True)]


def _micro(batch: Any, guess: tuple[Tensor, Tensor] | None, totals: list[int], device: torch.device) -> Micro:
    flat = {"following": guess[0], "after": guess[1]} if guess is not None else {}
    return Micro(
        step=step_of(batch, device),
        targets=batch.targets.flatten().to(device, non_blocking=True),
        num_targets=max(totals[0], 1),
        num_after=max(totals[1], 1),
        **{name: numbers.flatten().to(device, non_blocking=True) for name, numbers in flat.items()},
    )
