"""A step as rank 0 broadcasts it: the used part of the buffers, as 32-bit integers.

A header (rows, sequences, logits, blocks of the longest sequence, number of top logits, vocabulary size), then tokens, positions, slots,
starts, lengths, logit rows, and the block table. Nothing is unpickled, and what does not fit the buffers is refused.
"""

from __future__ import annotations

import sys

import numpy as np

from windlass.core.constants import BLOCK_TOKENS
from windlass.runtime.engine.execute.buffers import Buffers
from windlass.runtime.kernels.step import Step

HEADER = 6

assert sys.byteorder == "little", "integers are sent in native byte order"


def encode_step(step: Step) -> bytes:
    rows, sequences, logits = step.counts.tolist()
    width = -(-int(step.lengths[:sequences].max()) // BLOCK_TOKENS) if sequences else 0
    parts = [
        *(part[:rows] for part in (step.tokens, step.positions, step.slots)),
        step.starts[: sequences + 1],
        step.lengths[:sequences],
        step.logit_rows[:logits],
        step.blocks[:sequences, :width].flatten(),
    ]
    candidates = [0, 0] if step.candidates is None else step.candidates.tolist()
    header = np.array([rows, sequences, logits, width, *candidates], dtype=np.int32)
    return b"".join((header.tobytes(), *(part.cpu().numpy().tobytes() for part in parts)))


def decode_step(data: bytes, buffers: Buffers) -> None:
    """Into the buffers."""
    numbers = np.frombuffer(data, dtype=np.int32)
    if len(numbers) < HEADER or min(numbers[:HEADER]) < 0:
        raise ValueError(f"a step of {len(data)} bytes has no valid header")
    rows, sequences, logits, width, *candidates = (int(number) for number in numbers[:HEADER])
    room = (len(buffers.tokens), len(buffers.lengths), len(buffers.logit_rows), buffers.blocks.shape[1])
    sizes = (rows, rows, rows, sequences + 1, sequences, logits, sequences * width)
    if any(count > most for count, most in zip((rows, sequences, logits, width), room, strict=True)):
        raise ValueError(
            f"a step of {rows} rows, {sequences} sequences, {logits} logits and {width} blocks, exceeds the buffers {room}"
        )
    if len(numbers) != HEADER + sum(sizes):
        raise ValueError(f"a step of {len(numbers)} integers should have {HEADER + sum(sizes)}")
    parts = np.split(numbers[HEADER:], np.cumsum(sizes)[:-1])
    held = (buffers.tokens, buffers.positions, buffers.slots, buffers.starts, buffers.lengths, buffers.logit_rows)
    for to, part in zip(held, parts, strict=False):
        to[: len(part)] = part
    buffers.blocks[:sequences, :width] = parts[-1].reshape(sequences, width)
    buffers.counts[:] = rows, sequences, logits
    buffers.candidates[:] = candidates
