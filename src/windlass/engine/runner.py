"""Puts a step's tokens into buffers and runs the decoder on them. Owns the buffers; knows no requests, no sampling and no model.

The buffers have their largest size from the beginning and are refilled in place, so that on the CPU the decoder is recorded once, as
a flat list of native operations, and replayed; that costs no Python. On CUDA, steps in which every sequence has one token are graphs
(graphs.py). Where something in a decoder cannot be recorded, and for all other steps, it is called as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from windlass.engine.graphs import Graphs
from windlass.engine.scheduler import Chunk, Limits
from windlass.engine.sequence import Sequence as EngineSequence
from windlass.kernels import program
from windlass.kernels.guard import NotRecordable
from windlass.kernels.step import BLOCK_TOKENS, Cache, Step

Decoder = Callable[[Step, Sequence[Cache]], Tensor]
"""nn.Decoder, or a test's: logits fp32 of the rows that a step wants."""


class Buffers:
    """A Step on the device, and arrays in host memory that are the same on a CPU and are copied to it elsewhere.

    `apart`: two copies on a CPU too, as a test of the copying.
    """

    def __init__(self, limits: Limits, device: torch.device, apart: bool = False) -> None:
        apart = apart or device.type != "cpu"
        rows, sequences, logits = limits.max_step_tokens, limits.max_sequences, limits.max_step_logits
        sizes = (rows, rows, rows, sequences + 1, sequences, logits, 3)
        self._host = _zeros(sum(sizes), device)
        self._device = self._host.to(device, copy=True) if apart else self._host
        self.tokens, self.positions, self.slots, self.starts, self.lengths, self.logit_rows, self.counts = (
            part.numpy() for part in self._host.split(sizes)
        )
        blocks = _zeros(sequences * limits.max_blocks, device).view(sequences, limits.max_blocks)
        self._host_blocks, self.blocks = blocks, blocks.numpy()
        self._device_blocks = blocks.to(device, copy=True) if apart else blocks
        tokens, positions, slots, starts, lengths, logit_rows, _ = self._device.split(sizes)
        _, _, _, host_starts, host_lengths, _, counts = self._host.split(sizes)
        self.step = Step(
            tokens, positions, slots, starts, lengths, self._device_blocks, logit_rows, counts, host_starts, host_lengths
        )
        self._uploaded = torch.cuda.Event() if device.type == "cuda" else None

    def wait(self) -> None:
        """Until the host's side may be refilled: a copy from it may still be under way."""
        if self._uploaded is not None:
            self._uploaded.synchronize()

    def upload(self, num_sequences: int, blocks_changed: bool) -> None:
        if self._device is self._host:
            return
        is_cuda = self._uploaded is not None
        self._device.copy_(self._host, non_blocking=is_cuda)
        if blocks_changed:
            self._device_blocks[:num_sequences].copy_(self._host_blocks[:num_sequences], non_blocking=is_cuda)
        if self._uploaded is not None:
            self._uploaded.record()


def _zeros(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, pin_memory=device.type == "cuda")


class Runner:
    def __init__(
        self, decoder: Decoder, caches: Sequence[Cache], limits: Limits, device: str = "cpu", record: bool = True
    ) -> None:
        assert limits.block_tokens == BLOCK_TOKENS, "kernels have one size of block"
        self._decoder, self._caches = decoder, caches
        self._buffers = Buffers(limits, torch.device(device))
        self._in_rows: list[tuple[EngineSequence, int, int]] = []
        """Whose blocks each row of the table holds, how many of them, and since which preemption."""
        self._program: program.Program | None = None
        self._logits: Tensor | None = None
        self._graphs: Graphs | None = None
        self._spare_block = limits.num_blocks
        """After those that sequences may have, where the caches have one more: for rows that only fill a graph up."""
        self.why_not_recorded = self._prepared(torch.device(device).type, limits) if record else "not asked for"

    @property
    def decoder(self) -> Decoder:
        return self._decoder

    @property
    def program(self) -> program.Program | None:
        """What is replayed; None: the decoder is called."""
        return self._program

    @property
    def how(self) -> str:
        """In words."""
        if self._program is not None:
            return "replayed"
        if self._graphs is not None and not self._graphs.why_not:
            return "CUDA graphs"
        return f"called ({self.why_not_recorded or (self._graphs and self._graphs.why_not)})"

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Logits fp32 of the chunks' wanted rows, one after another; valid until the next run."""
        self._buffers.wait()
        changed = self._fill(chunks)
        size = self._graph_size(chunks)
        if size is not None:
            return self._replayed(chunks, size, changed)
        self._buffers.upload(len(chunks), changed)
        if self._program is not None:
            assert self._logits is not None
            self._program.run()
            return self._logits[: int(self._buffers.counts[2])]
        with torch.inference_mode():
            return self._decoder(self._buffers.step, self._caches)

    def _prepared(self, device: str, limits: Limits) -> str:
        """Empty where steps will be replayed."""
        if device == "cpu":
            return self._record()
        if device != "cuda" or torch.version.hip is not None:
            return "not on a CPU or an NVIDIA GPU"
        if any(cache.keys.shape[0] <= limits.num_blocks for cache in self._caches):
            return "caches without a spare block"
        self._graphs = Graphs(self._decoder, self._caches, self._buffers.step, limits.max_sequences)
        return ""

    # --- graphs

    def _graph_size(self, chunks: Sequence[Chunk]) -> int | None:
        """Where every sequence has one new token and wants its logits."""
        counts = self._buffers.counts
        if self._graphs is None or not (counts[0] == counts[1] == counts[2] == len(chunks)):
            return None
        return self._graphs.size(len(chunks))

    def _replayed(self, chunks: Sequence[Chunk], size: int, changed: bool) -> Tensor:
        assert self._graphs is not None
        count, buffers = len(chunks), self._buffers
        if size > count:
            changed |= self._fill_up(count, size)
        buffers.upload(size, changed)
        return self._graphs.run(size, int(buffers.lengths[:count].max()))[:count]

    def _fill_up(self, count: int, size: int) -> bool:
        """Rows count..size are nobody's. Whether the table of blocks has changed."""
        buffers = self._buffers
        buffers.tokens[count:size] = 0
        buffers.positions[count:size] = 0
        buffers.slots[count:size] = self._spare_block * BLOCK_TOKENS
        buffers.lengths[count:size] = 1
        buffers.starts[count + 1 : size + 1] = np.arange(count + 1, size + 1)
        buffers.logit_rows[count:size] = np.arange(count, size)
        changed = bool((buffers.blocks[count:size, 0] != self._spare_block).any())
        buffers.blocks[count:size, 0] = self._spare_block
        del self._in_rows[count:]
        return changed

    def _record(self) -> str:
        """Empty where it was recorded."""
        if not program.available():
            return "no compiled kernels"
        try:
            with program.record(self._buffers.step.counts[0:1]) as recorded:
                self._logits = self._decoder(self._buffers.step, self._caches)
        except NotRecordable as error:
            self._logits = None
            return str(error)
        self._program = recorded
        return ""

    # --- filling

    def _fill(self, chunks: Sequence[Chunk]) -> bool:
        """Whether the table of blocks has changed."""
        buffers = self._buffers
        row = num_logits = 0
        changed = False
        for number, chunk in enumerate(chunks):
            changed |= self._fill_blocks(number, chunk.sequence)
            start, stop, wanted = chunk.start, chunk.stop, chunk.stop - chunk.logits_from
            if stop - start == 1:
                buffers.tokens[row] = chunk.sequence.tokens[start]
                buffers.positions[row] = start
                buffers.slots[row] = chunk.sequence.blocks[start // BLOCK_TOKENS] * BLOCK_TOKENS + start % BLOCK_TOKENS
            else:
                self._fill_rows(row, number, chunk)
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

    def _fill_rows(self, row: int, number: int, chunk: Chunk) -> None:
        buffers, last = self._buffers, row + chunk.stop - chunk.start
        positions = np.arange(chunk.start, chunk.stop, dtype=np.int32)
        buffers.tokens[row:last] = chunk.sequence.tokens[chunk.start : chunk.stop]
        buffers.positions[row:last] = positions
        buffers.slots[row:last] = buffers.blocks[number, positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS

    def _fill_blocks(self, number: int, sequence: EngineSequence) -> bool:
        """Only what is new: a decoding sequence stays in its row, and its blocks only grow."""
        if number >= len(self._in_rows):
            self._in_rows.append((sequence, 0, -1))
        holder, num_written, since = self._in_rows[number]
        if holder is not sequence or since != sequence.num_preemptions:
            num_written = 0
        elif num_written == len(sequence.blocks):
            return False
        self._buffers.blocks[number, num_written : len(sequence.blocks)] = sequence.blocks[num_written:]
        self._in_rows[number] = (sequence, len(sequence.blocks), sequence.num_preemptions)
        return True
