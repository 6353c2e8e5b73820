"""Boxes of tensors: what they share, and who sends whom what."""

from __future__ import annotations

import pytest
import torch

from nbdist.train.survival.boxes import Box, Held, plan_transfers

KEY = (0, "parameter", 0, "")


def rows(begin, end):
    return Box((begin, 0), (end - begin, 2))


def test_boxes_share_their_overlap():
    assert rows(0, 4).overlap(rows(2, 6)) == rows(2, 4)
    assert rows(0, 2).overlap(rows(2, 4)) is None
    assert Box((), ()).overlap(Box((), ())) == Box((), ())


def test_the_shared_part_is_a_view_of_the_tensor():
    part = torch.arange(8).view(4, 2)

    assert rows(2, 6).cut(part, rows(3, 4)).tolist() == [[2, 3]]


def test_a_part_comes_from_the_rank_itself_where_it_has_it():
    held = [Held(rank, 0, 0, rows(0, 4)) for rank in (0, 1)]
    wanted = [Held(1, 0, 0, rows(0, 2)), Held(2, 0, 0, rows(2, 4))]

    plan = plan_transfers({KEY: held}, {KEY: wanted})

    assert [(one.source.rank, one.target.rank) for [*found] in plan for one in found] == [
        (1, 1), (0, 2),
    ]  # fmt: skip


def test_uneven_parts_are_put_together():
    held = [Held(0, 0, 0, rows(0, 3)), Held(1, 0, 0, rows(3, 5)), Held(2, 0, 0, rows(5, 5))]
    wanted = [Held(0, 0, 0, rows(0, 2)), Held(1, 0, 0, rows(2, 5))]

    [found] = plan_transfers({KEY: held}, {KEY: wanted})

    assert [(one.source.rank, one.target.rank, one.shared) for one in found] == [
        (0, 0, rows(0, 2)), (0, 1, rows(2, 3)), (1, 1, rows(3, 5)),
    ]  # fmt: skip


@pytest.mark.parametrize("held", [[], [Held(0, 0, 0, rows(0, 3))]])
def test_what_nobody_has_makes_no_plan(held):
    assert plan_transfers({KEY: held}, {KEY: [Held(0, 0, 0, rows(0, 4))]}) is None
