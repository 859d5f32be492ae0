"""The inputs of one forward pass, in buffers that the runner owns and refills in place, and the paged KV cache of one layer.

Buffers may be padded (`counts` has the true sizes), so that a recorded program or a captured CUDA graph, which fixes addresses,
serves every batch. Knows no model and no requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy
import torch
from torch import Tensor

from windlass.core.constants import BLOCK_TOKENS


@dataclass(frozen=True)
class Step:
    """Rows hold one sequence after another: sequence s has rows starts[s] .. starts[s + 1]."""

    tokens: Tensor
    """int32 [rows]"""
    positions: Tensor
    """int32 [rows], from 0 within each sequence"""
    slots: Tensor
    """int32 [rows]: cache slot of each row's key and value, block * BLOCK_TOKENS + offset"""
    starts: Tensor
    """int32 [sequences + 1]"""
    lengths: Tensor
    """int32 [sequences]: length of each sequence, this step's tokens included"""
    blocks: Tensor
    """int32 [sequences, blocks]: the block table"""
    logit_rows: Tensor
    """int32 [logits]: rows whose logits are needed"""
    counts: Tensor
    """int32 [3] on the host: true numbers of rows, sequences and logit rows"""
    host_starts: Tensor | None = None
    """Host copies of `starts` and `lengths` where the step is on a GPU, so that launching kernels needs no synchronization."""
    host_lengths: Tensor | None = None
    candidates: Tensor | None = None
    """int32 [2] on the host: how many of the largest logits per row are needed (0: all), and the number of real tokens (0: the whole
    vocabulary). Vocabulary-parallel ranks then exchange only those."""
    is_chained: bool = False
    """Sequences of one row each, of which some are the same sequence at consecutive positions: a row attends to keys that rows before it
    store in this step."""

    def sizes(self) -> tuple[list[int], list[int]]:
        """`starts` and `lengths` as numbers."""
        starts = self.starts if self.host_starts is None else self.host_starts
        lengths = self.lengths if self.host_lengths is None else self.host_lengths
        return starts.tolist(), lengths.tolist()

    def part(self, first: int, last: int) -> Step:
        """Sequences first..last alone, without logits. For steps without padding."""
        starts, _ = self.sizes()
        rows = slice(starts[first], starts[last])
        return Step(
            tokens=self.tokens[rows],
            positions=self.positions[rows],
            slots=self.slots[rows],
            starts=self.starts[first : last + 1] - starts[first],
            lengths=self.lengths[first:last],
            blocks=self.blocks[first:last],
            logit_rows=self.logit_rows[:0],
            counts=torch.tensor([rows.stop - rows.start, last - first, 0], dtype=torch.int32),
            host_starts=None if self.host_starts is None else self.host_starts[first : last + 1] - starts[first],
            host_lengths=None if self.host_lengths is None else self.host_lengths[first:last],
        )

    def trimmed(self) -> Step:
        """Without padding, for plain PyTorch."""
        rows, sequences, logits = self.counts.tolist()
        return Step(
            tokens=self.tokens[:rows],
            positions=self.positions[:rows],
            slots=self.slots[:rows],
            starts=self.starts[: sequences + 1],
            lengths=self.lengths[:sequences],
            blocks=self.blocks[:sequences],
            logit_rows=self.logit_rows[:logits],
            counts=self.counts,
            host_starts=None if self.host_starts is None else self.host_starts[: sequences + 1],
            host_lengths=None if self.host_lengths is None else self.host_lengths[:sequences],
            candidates=self.candidates,
            is_chained=self.is_chained,
        )


@dataclass(frozen=True)
class KvCache:
    """The paged KV cache of one layer.

    Keys are transposed within a block, [blocks, kv heads, head dim, BLOCK_TOKENS], so that the scores of a block's tokens are one
    vector. Values are [blocks, kv heads, BLOCK_TOKENS, value dim]. A latent cache has no separate values: they are the first
    `latent_values` elements of the keys, which then have the layout of values, [blocks, 1, BLOCK_TOKENS, width].
    """

    keys: Tensor
    values: Tensor | None
    latent_values: int = 0

    def store(self, keys: Tensor, values: Tensor | None, slots: Tensor) -> None:
        """keys [rows, kv heads, dim], values [rows, kv heads, value dim] into `slots`. The reference."""
        block, offset = slots.long() // BLOCK_TOKENS, slots.long() % BLOCK_TOKENS
        if self.values is None:
            self.keys[block, :, offset] = keys.to(self.keys.dtype)
            return
        assert values is not None
        self.keys[block, :, :, offset] = keys.to(self.keys.dtype)
        self.values[block, :, offset] = values.to(self.values.dtype)

    def of_heads(self, some: slice) -> KvCache:
        """The slice of some kv heads."""
        return KvCache(self.keys[:, some], None if self.values is None else self.values[:, some], self.latent_values)

    def gather(self, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` tokens of a sequence: keys [length, kv heads, dim], values [length, kv heads, value dim]."""
        used = blocks[: -(-length // BLOCK_TOKENS)].long()
        if self.values is None:
            keys = self.keys[used].transpose(1, 2).flatten(0, 1)[:length]
            return keys, keys[..., : self.latent_values]
        keys = self.keys[used].permute(0, 3, 1, 2).flatten(0, 1)[:length]
        return keys, self.values[used].transpose(1, 2).flatten(0, 1)[:length]


def attention_cache(num_blocks: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: str = "cpu") -> KvCache:
    shape = (num_blocks, num_kv_heads)
    return KvCache(
        keys=_zeros((*shape, head_dim, BLOCK_TOKENS), dtype, device),
        values=_zeros((*shape, BLOCK_TOKENS, head_dim), dtype, device),
    )


def latent_cache(num_blocks: int, latent: int, rope: int, dtype: torch.dtype, device: str = "cpu") -> KvCache:
    keys = _zeros((num_blocks, 1, BLOCK_TOKENS, latent + rope), dtype, device)
    return KvCache(keys=keys, values=None, latent_values=latent)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """On the CPU by NumPy (calloc), which is backed page by page when written: a cache takes memory as it fills."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(numpy.zeros(prod(shape) * dtype.itemsize, dtype=numpy.uint8)).view(dtype).view(shape)
