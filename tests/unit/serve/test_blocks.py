"""The books of the cache: every block free or held, prefixes found, versions kept apart."""

from __future__ import annotations

import random

import pytest

from nbdist.serve.blocks import BlockPool


def published(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Hold blocks for tokens and publish the full ones."""
    blocks = pool.allocate(pool.blocks_for(len(tokens)))
    digest, size = b"", pool.block_size
    for at in range(len(tokens) // size):
        digest = pool.publish(digest, tokens[at * size : (at + 1) * size], blocks[at])
    return blocks


def test_pool_finds_the_full_blocks_of_a_known_start_and_leaves_the_last_token():
    pool = BlockPool(8, 4)
    blocks = published(pool, list(range(8)))
    pool.release(blocks)

    assert pool.find([*range(8), 99]) == blocks
    assert pool.find(list(range(8))) == blocks[:1]
    assert pool.find([7, *range(1, 9)]) == []
    assert pool.num_used == 2


def test_pool_after_a_new_version_finds_nothing_of_the_old_one():
    pool = BlockPool(8, 4)
    pool.release(published(pool, list(range(8))))

    pool.new_version()

    assert pool.find([*range(8), 99]) == []
    assert pool.num_free == 8


def test_pool_hands_out_what_was_free_for_longest_and_forgets_it():
    pool = BlockPool(2, 2)
    first = published(pool, [1, 2])
    second = published(pool, [3, 4])
    pool.release(first)
    pool.release(second)

    assert pool.allocate(1) == first
    assert pool.find([1, 2, 0]) == []
    assert pool.find([3, 4, 0]) == second


def test_pool_with_too_few_free_blocks_hands_out_none():
    pool = BlockPool(3, 2)
    pool.allocate(2)

    assert pool.allocate(2) is None
    assert pool.num_free == 1


def test_pool_without_sharing_finds_nothing():
    pool = BlockPool(4, 2, share_prefixes=False)
    pool.release(published(pool, [1, 2]))

    assert pool.find([1, 2, 3]) == []


def test_pool_of_no_block_is_refused():
    with pytest.raises(ValueError, match="num_blocks=0"):
        BlockPool(0, 16)


def test_pool_under_random_traffic_never_gives_a_held_block_away():
    rng = random.Random(1)
    pool = BlockPool(24, 4)
    held: list[tuple[list[int], list[int]]] = []
    for _ in range(3000):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
        found = pool.find(tokens)
        fresh = pool.allocate(pool.blocks_for(len(tokens)) - len(found))
        if fresh is None:
            pool.release(found)
        else:
            others = {block for blocks, _ in held for block in blocks}
            assert not others & set(fresh)
            blocks, digest = found + fresh, b""
            for at in range(len(tokens) // 4):
                digest = pool.publish(digest, tokens[at * 4 : at * 4 + 4], blocks[at])
            held.append((blocks, tokens))
        while held and (fresh is None or rng.random() < 0.4):
            pool.release(held.pop(rng.randrange(len(held)))[0])
            fresh = []
        assert pool.num_used == len({block for blocks, _ in held for block in blocks})
    for blocks, _ in held:
        pool.release(blocks)
    assert pool.num_free == 24
