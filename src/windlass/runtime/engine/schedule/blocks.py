"""KV cache blocks: reference counts, allocation and the prefix cache. Pure bookkeeping: block numbers, no tensors.

A block is referenced by one or more sequences, or free. A full block can be cached: it is found by its tokens and all tokens before
them, so that a later sequence with the same prefix references it instead of computing it again. Only full blocks are shared, and
full blocks are never written to, so sharing copies nothing. A cached block without references is free, and evicted last, least
recently used first.

Every cached block gets a number that is never reused, its chain. The key of a block, (chain of the block before, its own tokens), thus
identifies the whole prefix exactly: the dictionary compares tokens, not only hashes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Key = tuple[int | str, tuple[int, ...]]


@dataclass(frozen=True)
class PrefixMatch:
    """The cached blocks of a prefix, and the chain of the last of them."""

    blocks: tuple[int, ...]
    chain: int | str


class BlockPool:
    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks, self.block_tokens = num_blocks, block_tokens
        self._ref_counts = [0] * num_blocks
        self._keys: list[Key | None] = [None] * num_blocks
        self._cached: dict[Key, tuple[int, int]] = {}
        """Key -> block, chain."""
        self._empty = list(range(num_blocks - 1, -1, -1))
        """Free and not cached."""
        self._evictable: OrderedDict[int, None] = OrderedDict()
        """Free but cached, least recently used first."""
        self._last_chain = 0

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._evictable)

    @property
    def num_evictable(self) -> int:
        """Free blocks that are still cached."""
        return len(self._evictable)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def match(self, tokens: Sequence[int], salt: str = "") -> PrefixMatch:
        """The longest cached prefix, short of the last token, which must be computed to get its logits."""
        chain: int | str = salt
        found: list[int] = []
        size = self.block_tokens
        for start in range(0, len(tokens) - size, size):
            entry = self._cached.get((chain, tuple(tokens[start : start + size])))
            if entry is None:
                break
            found.append(entry[0])
            chain = entry[1]
        return PrefixMatch(tuple(found), chain)

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of them are free now."""
        return sum(1 for block in blocks if not self._ref_counts[block])

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more reference to each block that `match` found."""
        for block in blocks:
            if not self._ref_counts[block]:
                del self._evictable[block]
            self._ref_counts[block] += 1

    def allocate(self) -> int:
        """A block to write to. The caller has checked that one is free."""
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            self._evict(block)
        self._ref_counts[block] = 1
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """Drops a sequence's references, last block first, so that prefixes are evicted after what follows them."""
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            assert self._ref_counts[block] >= 0, f"block {block} was released more often than acquired"
            if self._ref_counts[block]:
                continue
            if self._keys[block] is None:
                self._empty.append(block)
            else:
                self._evictable[block] = None

    def cache(self, block: int, chain: int | str, tokens: tuple[int, ...]) -> int:
        """Makes a full block findable; `chain` is that of the block before. Returns the block's own chain.

        If another block with the same prefix is cached already, that one stays, and this one is private to its sequence.
        """
        key = (chain, tokens)
        entry = self._cached.get(key)
        if entry is not None:
            return entry[1]
        self._last_chain += 1
        self._cached[key] = (block, self._last_chain)
        self._keys[block] = key
        return self._last_chain

    def _evict(self, block: int) -> None:
        key = self._keys[block]
        assert key is not None
        del self._cached[key]
        self._keys[block] = None
