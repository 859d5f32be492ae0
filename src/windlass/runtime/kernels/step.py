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
from windlass.runtime.kernels import fp8_cache


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

    In fp8 keys and values are e4m3 codes, and each token and head has a power of two (fp8_cache.py).
    """

    keys: Tensor
    values: Tensor | None
    latent_values: int = 0
    scales: Tensor | None = None
    """uint8 [blocks, kv heads, 2, BLOCK_TOKENS], of keys and of values; 1 in place of 2 in a latent cache. None: not in fp8."""

    def store(self, keys: Tensor, values: Tensor | None, slots: Tensor) -> None:
        """keys [rows, kv heads, dim], values [rows, kv heads, value dim] into `slots`. The reference."""
        block, offset = slots.long() // BLOCK_TOKENS, slots.long() % BLOCK_TOKENS
        if self.values is None:
            _bytes(self.keys)[block, :, offset] = self._stored(keys, 0, block, offset)
            return
        assert values is not None
        _bytes(self.keys)[block, :, :, offset] = self._stored(keys, 0, block, offset)
        _bytes(self.values)[block, :, offset] = self._stored(values, 1, block, offset)

    def _stored(self, numbers: Tensor, side: int, block: Tensor, offset: Tensor) -> Tensor:
        """In the type of the cache; of fp8 the powers are stored here."""
        if self.scales is None:
            return numbers.to(self.keys.dtype)
        codes, self.scales[block, :, side, offset] = fp8_cache.quantize(numbers)
        return _bytes(codes)

    def of_heads(self, some: slice) -> KvCache:
        """The slice of some kv heads."""
        scales = None if self.scales is None else self.scales[:, some]
        return KvCache(self.keys[:, some], None if self.values is None else self.values[:, some], self.latent_values, scales)

    def gather(self, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` tokens of a sequence: keys [length, kv heads, dim], values [length, kv heads, value dim]."""
        used = blocks[: -(-length // BLOCK_TOKENS)].long()
        if self.values is None:
            keys = self._read(_bytes(self.keys)[used].transpose(1, 2).flatten(0, 1)[:length], 0, used)
            return keys, keys[..., : self.latent_values]
        keys = _bytes(self.keys)[used].permute(0, 3, 1, 2).flatten(0, 1)[:length]
        values = _bytes(self.values)[used].transpose(1, 2).flatten(0, 1)[:length]
        return self._read(keys, 0, used), self._read(values, 1, used)

    def _read(self, stored: Tensor, side: int, used: Tensor) -> Tensor:
        """[tokens, kv heads, dim] of the blocks `used`, as numbers."""
        if self.scales is None:
            return stored
        scales = self.scales[used, :, side].transpose(1, 2).flatten(0, 1)[: stored.shape[0]]
        return fp8_cache.dequantize(stored.view(self.keys.dtype), scales)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All of its tensors."""
        return tuple(part for part in (self.keys, self.values, self.scales) if part is not None)


def _bytes(part: Tensor) -> Tensor:
    """Codes as bytes, which every PyTorch indexes; other types as they are."""
    return part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part


def attention_cache(num_blocks: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: str = "cpu") -> KvCache:
    shape = (num_blocks, num_kv_heads)
    return KvCache(
        keys=_zeros((*shape, head_dim, BLOCK_TOKENS), dtype, device),
        values=_zeros((*shape, BLOCK_TOKENS, head_dim), dtype, device),
        scales=_scales((*shape, 2), dtype, device),
    )


def latent_cache(num_blocks: int, latent: int, rope: int, dtype: torch.dtype, device: str = "cpu") -> KvCache:
    keys = _zeros((num_blocks, 1, BLOCK_TOKENS, latent + rope), dtype, device)
    return KvCache(keys=keys, values=None, latent_values=latent, scales=_scales((num_blocks, 1, 1), dtype, device))


def _scales(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor | None:
    return _zeros((*shape, BLOCK_TOKENS), torch.uint8, device) if dtype == torch.float8_e4m3fn else None


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """On the CPU by NumPy (calloc), which is backed page by page when written: a cache takes memory as it fills."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(numpy.zeros(prod(shape) * dtype.itemsize, dtype=numpy.uint8)).view(dtype).view(shape)
