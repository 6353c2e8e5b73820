"""What is said of the names of ranks that were replaced."""

from nbdist.cluster.healing import Healed
from nbdist.notebook.healed import summary

BUILT_AGAIN = "objects that were built over the old process group must be built again"


def test_one_replaced_rank_is_told_with_its_death_and_its_names():
    healed = Healed(
        deaths={1: "killed by SIGKILL"},
        pushed={1: ["a", "b"]},
        gone={1: [f"n{i}" for i in range(10)]},
        group_seconds=0.1,
        seconds=0.2,
    )
    assert summary(healed).splitlines() == [
        "rank 1 had died: killed by SIGKILL",
        "pushed again to rank 1: a, b",
        "gone, while another rank has them, on rank 1: n0, n1, n2, n3, n4, n5, n6, n7 and 2 more",
        BUILT_AGAIN,
    ]


def test_restart_of_all_ranks_says_that_the_rest_is_gone():
    healed = Healed(deaths={}, pushed={0: ["a"], 1: []}, gone=None, group_seconds=0.1, seconds=0.2)
    assert summary(healed).splitlines() == [
        "pushed again to rank 0: a",
        "all ranks are new: what was not pushed again is gone",
        BUILT_AGAIN,
    ]
