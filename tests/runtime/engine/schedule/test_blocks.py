from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.runtime.engine.schedule.blocks import BlockPool

pytestmark = pytest.mark.pure


def kept(pool: BlockPool, tokens: list[int], salt: str = "") -> list[int]:
    """Blocks for all tokens, the full ones findable."""
    blocks = [pool.allocate() for _ in range(pool.blocks_for(len(tokens)))]
    chain: int | str = salt
    for index in range(len(tokens) // pool.block_tokens):
        chain = pool.cache(blocks[index], chain, tuple(tokens[index * pool.block_tokens : (index + 1) * pool.block_tokens]))
    return blocks


def test_a_prefix_is_found_and_shared() -> None:
    pool = BlockPool(8, 4)
    first = kept(pool, list(range(10)))
    match = pool.match([*range(8), 99, 98, 97])
    assert list(match.blocks) == first[:2]
    pool.acquire(match.blocks)
    assert [pool.ref_count(block) for block in first] == [2, 2, 1]
    pool.release(match.blocks)
    pool.release(first)
    assert pool.num_free == 8
    assert pool.num_evictable == 2


def test_the_last_token_is_never_found() -> None:
    pool = BlockPool(8, 4)
    blocks = kept(pool, list(range(8)))
    assert list(pool.match(list(range(8))).blocks) == blocks[:1]
    assert list(pool.match(list(range(9))).blocks) == blocks[:2]


def test_the_same_tokens_after_another_beginning_are_another_block() -> None:
    pool = BlockPool(8, 4)
    kept(pool, [1, 1, 1, 1, 5, 6, 7, 8])
    assert pool.match([2, 2, 2, 2, 5, 6, 7, 8, 9]).blocks == ()
    assert pool.match([5, 6, 7, 8, 9]).blocks == ()


def test_salts_do_not_meet() -> None:
    pool = BlockPool(8, 4)
    kept(pool, list(range(8)), salt="one")
    assert pool.match(list(range(9)), "two").blocks == ()
    assert pool.match(list(range(9))).blocks == ()
    assert len(pool.match(list(range(9)), "one").blocks) == 2


def test_the_longest_unused_prefix_goes_first_and_its_end_before_its_beginning() -> None:
    pool = BlockPool(4, 4)
    old, new = kept(pool, list(range(8))), kept(pool, list(range(100, 108)))
    pool.release(old)
    pool.release(new)
    assert pool.allocate() == old[1]
    assert list(pool.match(list(range(9))).blocks) == old[:1]
    assert pool.allocate() == old[0]
    assert len(pool.match(list(range(100, 109))).blocks) == 2


def test_using_a_prefix_makes_it_the_newest() -> None:
    pool = BlockPool(4, 4)
    old, new = kept(pool, list(range(8))), kept(pool, list(range(100, 108)))
    pool.release(old)
    pool.release(new)
    match = pool.match(list(range(9)))
    pool.acquire(match.blocks)
    pool.release(match.blocks)
    assert pool.allocate() == new[1]


def test_a_second_copy_stays_its_sequences_own() -> None:
    pool = BlockPool(8, 4)
    first, second = kept(pool, list(range(8))), kept(pool, list(range(8)))
    assert not set(first) & set(second)
    assert list(pool.match(list(range(9))).blocks) == first
    pool.release(second)
    assert pool.num_evictable == 0
    assert pool.num_free == 6


def test_chains_whose_beginning_was_forgotten_are_not_found() -> None:
    """The beginning is computed again under a new number, which the old end does not follow."""
    pool = BlockPool(3, 4)
    first = kept(pool, list(range(8)))
    copy = [pool.allocate()]
    pool.cache(copy[0], "", (0, 1, 2, 3))  # the same content: not kept
    pool.release([first[0]])
    assert pool.allocate() == first[0]  # the beginning goes, while its end is still held
    assert pool.match(list(range(9))).blocks == ()
    pool.cache(first[0], "", (0, 1, 2, 3))
    assert list(pool.match(list(range(9))).blocks) == [first[0]]


def test_releasing_too_often_is_noticed() -> None:
    pool = BlockPool(2, 4)
    block = pool.allocate()
    pool.release([block])
    with pytest.raises(AssertionError, match="more often"):
        pool.release([block])


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=12), st.integers(1, 3))
def test_what_is_found_is_what_was_kept(prompts: list[list[int]], block_tokens: int) -> None:
    """With two token values collisions of content are everywhere; a match must still be a true prefix of what the block holds."""
    pool = BlockPool(64, block_tokens)
    content: dict[int, tuple[int, ...]] = {}
    for tokens in prompts:
        match = pool.match(tokens)
        assert len(match.blocks) * block_tokens < len(tokens)
        pool.acquire(match.blocks)
        blocks, chain = list(match.blocks), match.chain
        for index, block in enumerate(blocks):
            assert content[block] == tuple(tokens[: (index + 1) * block_tokens])
        for index in range(len(blocks), len(tokens) // block_tokens):
            block = pool.allocate()
            stop = (index + 1) * block_tokens
            content[block] = tuple(tokens[:stop])
            chain = pool.cache(block, chain, tuple(tokens[stop - block_tokens : stop]))
            blocks.append(block)
        pool.release(blocks)
    assert pool.num_free == 64
