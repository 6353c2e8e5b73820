"""Mesh degrees: arithmetic and the error that prints it."""

import re

import pytest

from nbdist.errors import NoWorldError
from nbdist.train.mesh import MeshConfig, build_mesh, resized_degrees


def test_open_axis_takes_what_the_others_leave():
    assert MeshConfig().degrees(3)["dp_shard"] == 3
    assert MeshConfig(dp_replicate=2).degrees(6)["dp_shard"] == 3
    assert MeshConfig(dp_replicate=-1, dp_shard=2).degrees(4)["dp_replicate"] == 2
    assert MeshConfig(tp=2, pp=2).degrees(8)["dp_shard"] == 2


def test_axes_that_talk_most_come_last():
    assert list(MeshConfig().degrees(1)) == ["pp", "dp_replicate", "dp_shard", "cp", "ep", "tp"]


def test_wrong_product_prints_the_whole_equation():
    expected = (
        "mesh degrees do not cover the world: pp=1 * dp_replicate=1 * dp_shard=2 * cp=1 * ep=1 * "
        "tp=2 = 4, but world_size=6; set dp_shard=3 or start 4 ranks"
    )
    with pytest.raises(ValueError, match=re.escape(expected)):
        MeshConfig(dp_shard=2, tp=2).degrees(6)


def test_wrong_product_offers_only_what_is_possible():
    with pytest.raises(ValueError, match=r"= 4, but world_size=3; start 4 ranks"):
        MeshConfig(dp_replicate=2, dp_shard=2).degrees(3)


def test_open_axis_that_does_not_divide_asks_for_a_multiple():
    with pytest.raises(ValueError, match=r"dp_shard=-1 .* but world_size=3; start a multiple of 2"):
        MeshConfig(dp_replicate=2).degrees(3)


@pytest.mark.parametrize("degree", [0, -2])
def test_degree_below_one_is_refused(degree):
    with pytest.raises(ValueError, match="not all >= 1"):
        MeshConfig(dp_replicate=degree)


def test_two_open_axes_are_refused():
    with pytest.raises(ValueError, match="more than one -1"):
        MeshConfig(dp_replicate=-1, dp_shard=-1)


def test_build_mesh_without_a_group_says_where_to_call_it():
    with pytest.raises(NoWorldError, match="inside a %%distributed cell"):
        build_mesh()


@pytest.mark.parametrize(
    ("before", "world_size", "after"),
    [
        ({"dp_shard": 3}, 2, {"dp_shard": 2}),
        ({"dp_replicate": 1, "dp_shard": 2, "tp": 2}, 6,
         {"dp_replicate": 1, "dp_shard": 3, "tp": 2}),
        ({"dp_replicate": 4, "dp_shard": 1}, 3, {"dp_replicate": 3, "dp_shard": 1}),
        ({"dp_replicate": 2, "dp_shard": 2}, 6, {"dp_replicate": 3, "dp_shard": 2}),
        ({"dp_replicate": 2, "dp_shard": 2}, 3, {"dp_replicate": 1, "dp_shard": 3}),
    ],
)  # fmt: skip
def test_another_world_changes_the_data_parallel_axes(before, world_size, after):
    assert resized_degrees(before, world_size) == after


def test_a_world_that_fixed_axes_do_not_divide_prints_the_equation():
    expected = (
        "mesh degrees do not cover the world: pp=2 * tp=2 = 4 cannot change while a run goes on, "
        "but world_size=6; ask for a multiple of 4 ranks"
    )
    with pytest.raises(ValueError, match=re.escape(expected)):
        resized_degrees({"pp": 2, "dp_shard": 2, "tp": 2}, 6)
