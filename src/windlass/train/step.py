"""One optimizer step's micro-batches: which samples are whose, what is counted first, forward and backward, one after another.

`Alone` is one process without others; `train.spread` has the same for many. Whatever is summed over ranks goes through these few calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from windlass.train.model.model import Micro, Trained
from windlass.train.model.packing import IGNORED, after_next, moved, step_of
from windlass.train.params.layout import Part, Slab


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

    def owned(self, part: Part) -> Part:
        """What of it this rank saves, where several hold the same rows."""
        return part

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


@dataclass(frozen=True)
class Prepared:
    """Micro-batches in host memory, and how many targets they have."""

    micros: list[Micro]
    learned: int
    after: int


def prepare(batches: Any, first: int, count: int, micro_batch: int, ahead: bool) -> Prepared:
    """Samples first, first + 1... in micro-batches. Asks no device and no rank, so that it can be done while another step runs."""
    starts = range(first, first + count, micro_batch)
    micros = [_micro(batches.batch(start, min(micro_batch, first + count - start)), ahead) for start in starts]
    learned = sum(int((micro.targets != IGNORED).sum()) for micro in micros)
    after = sum(int((micro.after != IGNORED).sum()) for micro in micros if micro.after is not None)
    return Prepared(micros, learned, after)


def _micro(batch: Any, ahead: bool) -> Micro:
    following, after = after_next(batch) if ahead else (None, None)
    return Micro(
        step=step_of(batch),
        targets=batch.targets.flatten(),
        num_targets=1,
        following=None if following is None else following.flatten(),
        after=None if after is None else after.flatten(),
    )


def on_device(prepared: Prepared, ranks: Any, device: torch.device) -> list[Micro]:
    """With the targets of all ranks counted: the loss is a mean over the whole step."""
    learned, after = ranks.summed(torch.tensor([prepared.learned, prepared.after], device=device)).tolist()
    return [_on_device(micro, device, max(learned, 1), max(after, 1)) for micro in prepared.micros]


def _on_device(micro: Micro, device: torch.device, learned: int, after: int) -> Micro:
    rest = {name: getattr(micro, name) for name in ("targets", "following", "after")}
    there = {name: None if numbers is None else numbers.to(device, non_blocking=True) for name, numbers in rest.items()}
    return replace(micro, step=moved(micro.step, device), num_targets=learned, num_after=after, **there)


class Ahead:
    """The next step's samples are made ready while this one runs."""

    def __init__(self, make: Callable[[int], Prepared]) -> None:
        self._make = make
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._coming: tuple[int, Future[Prepared]] | None = None

    def take(self, first: int, then: int) -> Prepared:
        """Those that begin at `first`; most likely those at `then` are asked for next."""
        coming, self._coming = self._coming, None
        found = coming[1].result() if coming is not None and coming[0] == first else self._make(first)
        self._coming = (then, self._maker.submit(self._make, then))
        return found
