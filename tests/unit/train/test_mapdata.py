"""Any map-style data set: shards without overlap, epochs, uneven ends, draws by sample."""

import random
import re

import numpy as np
import pytest
import torch

from nbdist.train import MapData


class Numbers:
    """Samples (index, what three generators drew)."""

    def __init__(self, number):
        self.number = number

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        drawn = torch.stack(
            [torch.rand(()), torch.tensor(np.random.rand()), torch.tensor(random.random())]
        )
        return torch.tensor(index), drawn.float()


def _rows(data, rank, world_size, size=4):
    return data.for_rank(global_batch_size=size, rank=rank, world_size=world_size)


def _run(data, world_size, steps, size=4):
    """Return indices and draws of all steps, ranks in order."""
    ranks = [_rows(data, rank, world_size, size) for rank in range(world_size)]
    batches = [rows.batch(step) for step in steps for rows in ranks]
    return torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches])


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_number_of_ranks_reads_the_same_samples_with_the_same_draws(world_size):
    data = MapData(Numbers(10), seed=3)

    alone, together = _run(data, 1, range(5)), _run(data, world_size, range(5))

    assert torch.equal(alone[0], together[0])
    assert torch.equal(alone[1], together[1])


def test_each_epoch_visits_every_sample_once_in_another_order():
    data = MapData(Numbers(10), seed=3)

    ids, drawn = _run(data, 2, range(5))  # 20 rows: two epochs, the third batch in both
    first, second = ids[:10].tolist(), ids[10:].tolist()

    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert len({tuple(row) for row in drawn.tolist()}) == 20  # the second time drawn anew
    again, other = MapData(Numbers(10), seed=3), MapData(Numbers(10), seed=4)
    assert torch.equal(_run(again, 2, range(5))[1], drawn)
    assert not torch.equal(_run(other, 2, range(5))[0], ids)
    plain = MapData(Numbers(10), shuffle=False)
    assert _run(plain, 2, range(5))[0].tolist() == [*range(10)] * 2


def test_generators_of_the_process_are_left_alone():
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = torch.rand(()), np.random.rand(), random.random()

    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    _rows(MapData(Numbers(10)), 0, 1).batch(0)

    assert (torch.rand(()), np.random.rand(), random.random()) == expected


def test_workers_read_what_the_rank_would_and_follow_a_jump():
    rows = _rows(MapData(Numbers(10), seed=3), 1, 2)
    ahead = _rows(MapData(Numbers(10), seed=3, num_workers=2), 1, 2)

    torch.manual_seed(1)
    state = torch.get_rng_state()
    for step in (0, 1, 2, 7, 8, 1):
        for expected, found in zip(rows.batch(step), ahead.batch(step), strict=True):
            assert torch.equal(expected, found)
        assert ahead.sample_ids(step) == rows.sample_ids(step) == rows.batch(step)[0].tolist()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("number", "size", "world_size"), [(11, 4, 3), (5, 4, 4), (9, 8, 2)])
def test_validation_batches_are_all_samples_once_though_the_last_is_uneven(
    number, size, world_size
):
    data = MapData(Numbers(10), validation=Numbers(number))
    ranks = [_rows(data, rank, world_size, size) for rank in range(world_size)]
    count = ranks[0].num_validation_batches

    parts = [rows.validation_batch(index)[0] for index in range(count) for rows in ranks]

    assert min(len(part) for part in parts) >= 1
    assert torch.cat(parts).tolist() == list(range(number))


def test_what_cannot_be_dealt_is_refused():
    with pytest.raises(ValueError, match="without __len__"):
        MapData(iter([1]))
    with pytest.raises(ValueError, match="without samples"):
        MapData([(1, 1)], validation=[])
    with pytest.raises(ValueError, match=re.escape("was given batch_size, sampler")):
        MapData(Numbers(3), batch_size=3, sampler=None)
    with pytest.raises(ValueError, match="every rank needs a row"):
        _rows(MapData(Numbers(10), validation=Numbers(1)), 0, 2)
    with pytest.raises(ValueError, match="give a collate_fn that returns two tensors"):
        _rows(MapData([1, 2, 3]), 0, 1).batch(0)
