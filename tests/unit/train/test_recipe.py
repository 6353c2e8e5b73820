"""A run on another number of ranks: the global batch stays, micro-batches do not grow."""

from __future__ import annotations

import pytest

from nbdist.train.config import TrainConfig
from nbdist.train.parallelize.skeleton import Skeleton
from nbdist.train.survival.recipe import Recipe


def recipe(degrees, *, micro_rows, **config):
    return Recipe(
        skeleton=Skeleton(None), options={}, device_type="cpu", degrees=degrees, data=None,
        config=TrainConfig(num_steps=1, **config), records=[], micro_rows=micro_rows,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("world_size", "accumulation_steps"), [(1, 3), (2, 2), (3, 1), (4, 1), (16, 1)]
)
def test_rows_that_are_too_many_for_a_rank_are_accumulated(world_size, accumulation_steps):
    of_three = recipe({"dp_shard": 3}, micro_rows=6, global_batch_size=16)

    made = of_three.for_world(world_size)

    assert made.config.accumulation_steps == accumulation_steps
    assert made.config.global_batch_size == 16
    assert made.degrees == {"dp_shard": world_size}
    assert made.is_resized


def test_a_pipeline_cuts_its_rows_itself():
    made = recipe({"pp": 2, "dp_shard": 2}, micro_rows=8).for_world(2)

    assert made.config.accumulation_steps == 1


def test_a_world_with_more_ranks_than_rows_is_refused():
    with pytest.raises(ValueError, match="global_batch_size=4 has no row for each of the 5"):
        recipe({"dp_shard": 2}, micro_rows=2, global_batch_size=4).for_world(5)
