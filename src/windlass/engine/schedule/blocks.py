"""Who holds which block of the KV cache. Pure bookkeeping: numbers of blocks, no tensors.

A block is *held* by one or more sequences, or it is free. A full block may be *kept*: it is known by its tokens and all tokens before
them, so that a later sequence with the same beginning holds it too instead of computing it again. Only full blocks are shared, and
nobody writes to a full block, so sharing copies nothing. A kept block that nobody holds is free and is the last to be used again,
the longest unused first.

What comes before a block is known by a number given to every kept block, never used twice. So the key of a block, (number of the
one before, its own tokens), stands for the whole prefix exactly: the dictionary compares tokens, not only their hash.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Key = tuple[int | str, tuple[int, ...]]


@dataclass(frozen=True)
class PrefixMatch:
    """The kept blocks that a prefix begins with, and what stands for all their tokens together."""

    blocks: tuple[int, ...]
    chain: int | str


class BlockPool:
    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks, self.block_tokens = num_blocks, block_tokens
        self._holders = [0] * num_blocks
        self._keys: list[Key | None] = [None] * num_blocks
        self._kept: dict[Key, tuple[int, int]] = {}
        """Key -> block, chain."""
        self._empty = list(range(num_blocks - 1, -1, -1))
        """Free, with nothing worth keeping in them."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Free but kept, the longest unused first."""
        self._last_chain = 0

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Free blocks with a prefix in them."""
        return len(self._idle)

    def holders(self, block: int) -> int:
        return self._holders[block]

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def match(self, tokens: Sequence[int], salt: str = "") -> PrefixMatch:
        """The longest kept prefix, which holds less than all tokens: the last one must be computed to know what follows it."""
        chain: int | str = salt
        found: list[int] = []
        size = self.block_tokens
        for start in range(0, len(tokens) - size, size):
            entry = self._kept.get((chain, tuple(tokens[start : start + size])))
            if entry is None:
                break
            found.append(entry[0])
            chain = entry[1]
        return PrefixMatch(tuple(found), chain)

    def num_unheld(self, blocks: Iterable[int]) -> int:
        """How many of them holding would take from the free ones."""
        return sum(1 for block in blocks if not self._holders[block])

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holder of blocks that `match` found."""
        for block in blocks:
            if not self._holders[block]:
                del self._idle[block]
            self._holders[block] += 1

    def take(self) -> int:
        """A block to write in. The caller has seen that there is one."""
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
        self._holders[block] = 1
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """Gives back a sequence's blocks, given in order. The last goes first: a prefix is of more use than what follows it."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            assert self._holders[block] >= 0, f"block {block} was released more often than held"
            if self._holders[block]:
                continue
            if self._keys[block] is None:
                self._empty.append(block)
            else:
                self._idle[block] = None

    def keep(self, block: int, chain: int | str, tokens: tuple[int, ...]) -> int:
        """Makes a full block findable; `chain` stands for what comes before it. Gives the chain up to and with this block.

        Where another block with the same content is kept already, that one stays and this one remains its sequence's own.
        """
        key = (chain, tokens)
        entry = self._kept.get(key)
        if entry is not None:
            return entry[1]
        self._last_chain += 1
        self._kept[key] = (block, self._last_chain)
        self._keys[block] = key
        return self._last_chain

    def forget_all(self) -> None:
        """No prefix will be found any more; what sequences hold stays theirs."""
        self._kept.clear()
        self._keys = [None] * self.num_blocks
        self._empty += self._idle
        self._idle.clear()

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        assert key is not None
        del self._kept[key]
        self._keys[block] = None
