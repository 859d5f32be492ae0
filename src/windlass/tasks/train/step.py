"""The micro-batches of one optimizer step: preparing them, forward and backward; and the ranks' view of it.

`SingleRank` is a single process; `train.parallel.ranks.MeshRank` overrides it for many. All communication of a step goes through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from windlass.tasks.train.data.batches import Batches, PackedBatch
from windlass.tasks.train.model.model import MicroBatch, TrainingModel
from windlass.tasks.train.model.packing import IGNORED, mtp_targets, packed_step, step_to
from windlass.tasks.train.params.layout import ParameterLayout, TensorSlice
from windlass.tasks.train.progress import RankTimes


@dataclass(frozen=True)
class StepLosses:
    """This rank's part of the means over the whole step; the sum over ranks is the mean."""

    entropy: Tensor
    mtp: Tensor | None = None


class SingleRank:
    """A single process: sums over ranks are the identity."""

    rank = 0
    dp_rank, dp_size = 0, 1
    owns_losses = True
    """Whether this rank adds the auxiliary losses of its tokens; one of the tp ranks does."""

    def sum_over_data(self, numbers: Tensor) -> Tensor:
        """Over ranks with different samples."""
        return numbers

    def sum_over_data_and_stages(self, numbers: Tensor) -> Tensor:
        """Over ranks with different samples or different layers."""
        return numbers

    def sum_over_all(self, number: Tensor) -> Tensor:
        return number

    def run(self, model: TrainingModel, micros: Sequence[MicroBatch]) -> StepLosses:
        """Forward and backward of all micro-batches; accumulates gradients."""
        return accumulate_gradients(model, micros)

    def evaluate(self, model: TrainingModel, micros: Sequence[MicroBatch]) -> Tensor:
        """Cross-entropy only. Runs with gradients enabled, so that the same kernels run as in training."""
        return torch.stack([model(micro).entropy for micro in micros]).sum()

    def reduce_gradients(self, parameters: Mapping[str, Tensor]) -> None:
        """Sums gradients over ranks that hold the same parameters."""

    def norm_weight(self, name: str) -> float | Tensor:
        """Weight of this rank's squared gradient in the global norm: one over the number of ranks that hold the same values."""
        return 1.0

    def gather_loads(self, loads: list[Tensor]) -> list[Tensor]:
        """Expert loads of all layers, over pipeline stages."""
        return loads

    def end_step(self, seconds: float) -> tuple[RankTimes, ...]:
        """The time of all ranks, now and then; see train.parallel.rank_clock."""
        return ()

    def saved_slice(self, part: TensorSlice) -> TensorSlice:
        """The part of it that this rank saves, if several ranks hold the same rows."""
        return part

    def local_slices(self, layout: ParameterLayout, tensor: Tensor) -> Iterable[tuple[TensorSlice, Tensor]]:
        """A parameter, or an optimizer state of it, as views of our tensors."""
        return layout.split(tensor)


def accumulate_gradients(
    model: TrainingModel, micros: Sequence[MicroBatch], before: Callable[[Any, bool], None] | None = None
) -> StepLosses:
    """`before` each micro-batch is called with the model, and whether it is the last."""
    entropies, mtp = list[Tensor](), list[Tensor]()
    for number, micro in enumerate(micros):
        if before is not None:
            before(model, number == len(micros) - 1)
        losses = model(micro)
        losses.objective.backward()
        entropies.append(losses.entropy)
        if losses.mtp is not None:
            mtp.append(losses.mtp)
    return StepLosses(torch.stack(entropies).sum(), torch.stack(mtp).sum() if mtp else None)


def rank_samples(first: int, global_batch: int, rank: int, size: int) -> tuple[int, int]:
    """(first sample, count) of a data-parallel rank: a contiguous range of the step's samples."""
    count = global_batch // size
    return first + rank * count, count


@dataclass(frozen=True)
class PreparedStep:
    """Micro-batches in host memory, and their number of targets."""

    micros: list[MicroBatch]
    num_targets: int
    num_mtp_targets: int


def prepare(batches: Batches, first: int, count: int, micro_batch: int, mtp: bool) -> PreparedStep:
    """Samples first, first + 1... in micro-batches. Needs no device and no communication, so it can run during another step."""
    starts = range(first, first + count, micro_batch)
    micros = [_micro_batch(batches.batch(start, min(micro_batch, first + count - start)), mtp) for start in starts]
    num_targets = sum(int((micro.targets != IGNORED).sum()) for micro in micros)
    num_mtp = sum(int((micro.mtp_targets != IGNORED).sum()) for micro in micros if micro.mtp_targets is not None)
    return PreparedStep(micros, num_targets, num_mtp)


def _micro_batch(batch: PackedBatch, mtp: bool) -> MicroBatch:
    inputs, targets = mtp_targets(batch) if mtp else (None, None)
    return MicroBatch(
        step=packed_step(batch),
        targets=batch.targets.flatten(),
        num_targets=1,
        mtp_inputs=None if inputs is None else inputs.flatten(),
        mtp_targets=None if targets is None else targets.flatten(),
    )


def to_device(prepared: PreparedStep, ranks: SingleRank, device: torch.device) -> list[MicroBatch]:
    """Also sums the number of targets over ranks: the loss is a mean over the whole step."""
    counts = torch.tensor([prepared.num_targets, prepared.num_mtp_targets], device=device)
    num_targets, num_mtp = ranks.sum_over_data(counts).tolist()
    return [_to_device(micro, device, max(num_targets, 1), max(num_mtp, 1)) for micro in prepared.micros]


def _to_device(micro: MicroBatch, device: torch.device, num_targets: int, num_mtp: int) -> MicroBatch:
    host = {name: getattr(micro, name) for name in ("targets", "mtp_inputs", "mtp_targets")}
    moved = {name: None if numbers is None else numbers.to(device, non_blocking=True) for name, numbers in host.items()}
    return replace(micro, step=step_to(micro.step, device), num_targets=num_targets, num_mtp_targets=num_mtp, **moved)


class Prefetcher:
    """Prepares the next step's samples in a thread while the current step runs."""

    def __init__(self, prepare: Callable[[int], PreparedStep]) -> None:
        self._prepare = prepare
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._next: tuple[int, Future[PreparedStep]] | None = None

    def take(self, first: int, following: int) -> PreparedStep:
        """The step that begins at sample `first`; prefetches the one at `following`."""
        prefetched, self._next = self._next, None
        found = prefetched[1].result() if prefetched is not None and prefetched[0] == first else self._prepare(first)
        self._next = (following, self._executor.submit(self._prepare, following))
        return found
