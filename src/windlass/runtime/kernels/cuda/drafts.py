"""The next step's inputs after a step that verified a draft of each sequence, on the device."""

from __future__ import annotations

from torch import Tensor

from windlass.runtime.kernels.cuda import driver
from windlass.runtime.kernels.step import Step

THREADS = 256


def advance_pairs(chosen: Tensor, drafted: Tensor, step: Step, counts: Tensor) -> None:
    """Rows 2i and 2i + 1 of `step` are a sequence's newest token and its draft; the first `counts[0]` (on the device) rows become those of the
    next step. chosen, drafted int32 [rows]: the token after each row, and the draft after that."""
    run = driver.kernel("drafts.cu", "PPPPPPPPI", "advance_pairs", packed=False)
    pairs = chosen.shape[0] // 2
    run(
        (-(-pairs // THREADS),), THREADS, chosen, drafted, counts, step.tokens, step.positions, step.lengths, step.slots, step.blocks,
        step.blocks.shape[1],
    )  # fmt: skip
