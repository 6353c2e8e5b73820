"""Who is which rank when their number changes."""

import pytest

from nbdist.cluster.places import Places, plan_places


@pytest.mark.parametrize(
    ("alive", "num_ranks", "moves", "leaving", "new"),
    [
        ([0, 1], 4, {}, [], [2, 3]),
        ([0, 1, 2, 3], 2, {}, [2, 3], []),
        ([0, 2], 2, {2: 1}, [], []),
        ([0, 1, 3], 3, {3: 2}, [], []),
        ([2, 3], 3, {3: 0}, [], [1]),
        ([0, 2, 3], 2, {2: 1}, [3], []),
        ([0, 2], 3, {}, [], [1]),
    ],
)
def test_ranks_keep_their_number_or_take_that_of_a_lost_one(alive, num_ranks, moves, leaving, new):
    assert plan_places(alive, num_ranks) == Places(moves=moves, leaving=leaving, new=new)
