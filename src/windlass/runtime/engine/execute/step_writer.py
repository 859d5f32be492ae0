"""Writes scheduled chunks into the buffers of a step. Knows no decoder and no graphs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from windlass.core.constants import BLOCK_TOKENS
from windlass.runtime.engine.execute.buffers import Buffers
from windlass.runtime.engine.schedule.scheduler import Chunk
from windlass.runtime.engine.schedule.sequence import Sequence as EngineSequence


class StepWriter:
    def __init__(self, buffers: Buffers, spare_block: int) -> None:
        """`spare_block`: for padding rows, the last block of the caches, which the scheduler does not know."""
        self._buffers, self._spare_block = buffers, spare_block
        self._block_rows: list[tuple[EngineSequence, int, int]] = []
        """Of each row of the block table: its sequence, the number of blocks written, and the sequence's preemption count then."""

    def write(self, chunks: Sequence[Chunk]) -> bool:
        """Returns whether the block table changed."""
        buffers = self._buffers
        row = num_logits = 0
        changed = False
        for number, chunk in enumerate(chunks):
            changed |= self.write_blocks(number, chunk.sequence)
            start, stop, wanted = chunk.start, chunk.stop, chunk.stop - chunk.logits_from
            if stop - start == 1:
                buffers.tokens[row] = chunk.tokens[0]
                buffers.positions[row] = start
                buffers.slots[row] = chunk.sequence.blocks[start // BLOCK_TOKENS] * BLOCK_TOKENS + start % BLOCK_TOKENS
            else:
                self._write_rows(row, number, chunk)
            row += stop - start
            buffers.starts[number + 1] = row
            buffers.lengths[number] = stop
            if wanted == 1:
                buffers.logit_rows[num_logits] = row - 1
            elif wanted:
                buffers.logit_rows[num_logits : num_logits + wanted] = np.arange(row - wanted, row)
            num_logits += wanted
        buffers.counts[:] = (row, len(chunks), num_logits)
        return changed

    def _write_rows(self, row: int, number: int, chunk: Chunk) -> None:
        buffers, last = self._buffers, row + chunk.stop - chunk.start
        positions = np.arange(chunk.start, chunk.stop, dtype=np.int32)
        buffers.tokens[row:last] = chunk.tokens
        buffers.positions[row:last] = positions
        buffers.slots[row:last] = buffers.blocks[number, positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS

    def write_rows_apart(self, chunks: Sequence[Chunk]) -> bool:
        """Each row as a sequence of its own. Returns whether the block table changed."""
        buffers, changed, row = self._buffers, False, 0
        for chunk in chunks:
            for position, token in enumerate(chunk.tokens, chunk.start):
                changed |= self.write_blocks(row, chunk.sequence)
                buffers.tokens[row], buffers.positions[row], buffers.lengths[row] = token, position, position + 1
                buffers.slots[row] = chunk.sequence.blocks[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS
                row += 1
        buffers.starts[: row + 1], buffers.logit_rows[:row] = np.arange(row + 1), np.arange(row)
        buffers.counts[:] = row
        return changed

    def pad(self, count: int, size: int) -> bool:
        """Rows count..size are padding. Returns whether the block table changed."""
        buffers = self._buffers
        buffers.tokens[count:size] = 0
        buffers.positions[count:size] = 0
        buffers.slots[count:size] = self._spare_block * BLOCK_TOKENS
        buffers.lengths[count:size] = 1
        buffers.starts[count + 1 : size + 1] = np.arange(count + 1, size + 1)
        buffers.logit_rows[count:size] = np.arange(count, size)
        changed = bool((buffers.blocks[count:size, 0] != self._spare_block).any())
        buffers.blocks[count:size, 0] = self._spare_block
        del self._block_rows[count:]
        return changed

    def write_blocks(self, number: int, sequence: EngineSequence) -> bool:
        """Writes only new blocks: a decoding sequence keeps its row, and its blocks only grow."""
        if number >= len(self._block_rows):
            self._block_rows.append((sequence, 0, -1))
        holder, num_written, since = self._block_rows[number]
        if holder is not sequence or since != sequence.num_preemptions:
            num_written = 0
        elif num_written == len(sequence.blocks):
            return False
        self._buffers.blocks[number, num_written : len(sequence.blocks)] = sequence.blocks[num_written:]
        self._block_rows[number] = (sequence, len(sequence.blocks), sequence.num_preemptions)
        return True
