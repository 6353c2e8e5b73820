"""From which step and from whose memory a run goes on."""

from __future__ import annotations

from nbdist.train.survival.choice import Source, choose
from nbdist.train.survival.mirror import Offer


def sharded(rank, world_size, own, kept, *, is_whole=True):
    """Return the offer of a rank that has a part of the weights of its own."""
    neighbour = (rank - 1) % world_size
    return Offer(
        place=(rank,), step=max(own), own=own, neighbour=neighbour, kept=kept, is_whole=is_whole
    )


def replica(rank, world_size, own, kept):
    """Return the offer of a rank that has what all have; it keeps random states only."""
    neighbour = (rank - 1) % world_size
    return Offer(place=(), step=max(own), own=own, neighbour=neighbour, kept=kept, is_whole=False)


def new(place):
    """Return the offer of a rank that has nothing."""
    return Offer(place=place, step=0, own=(), neighbour=None, kept=(), is_whole=False)


def test_a_lost_part_comes_from_the_neighbour():
    choice = choose([sharded(0, 2, (6, 7), (6, 7)), new((1,))])
    assert choice.step == 7
    assert choice.sources == {1: Source(rank=0, is_own=False, rng_rank=0)}


def test_the_newest_step_that_all_have_is_taken():
    # Rank 0 is a step ahead, and the copy of rank 2 after step 7 has not arrived on it.
    offers = [sharded(0, 3, (6, 7), (6,)), sharded(1, 3, (5, 6), (5, 6)), new((2,))]
    assert choose(offers).step == 6


def test_a_replica_comes_from_an_equal_rank_with_its_own_random_states():
    choice = choose([replica(0, 3, (4, 5), (4, 5)), new(()), replica(2, 3, (4, 5), (4, 5))])
    assert choice.step == 5
    assert choice.sources == {1: Source(rank=0, is_own=True, rng_rank=2)}


def test_random_states_come_before_a_newer_step():
    choice = choose([replica(0, 2, (4, 5), (4,)), new(())])
    assert (choice.step, choice.sources[1].rng_rank) == (4, 0)


def test_without_random_states_a_run_still_goes_on():
    # Ranks 1 and 2 are gone: rank 2 kept the random states of rank 1.
    choice = choose([replica(0, 3, (4, 5), (4, 5)), new(()), new(())])
    assert choice.step == 5
    assert [choice.sources[rank].rng_rank for rank in (1, 2)] == [None, 0]


def test_a_part_that_is_gone_with_its_copy_leaves_nothing():
    assert choose([sharded(0, 3, (4, 5), (4, 5)), new((1,)), new((2,))]) is None
    assert choose([new((0,)), new((1,))]) is None


def test_no_common_step_leaves_nothing():
    assert choose([sharded(0, 3, (4, 5), (4,)), sharded(1, 3, (2, 3), (3,)), new((2,))]) is None
