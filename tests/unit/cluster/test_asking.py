"""Whose request is put to the user: arrival, then whoever was answered last."""

import pytest

from nbdist.cluster.asking import FOLLOW_SECONDS, Turns, answering
from nbdist.messages import InputRequest, RankDone
from nbdist.testing import ManualClock


def request(rank, number=1):
    return InputRequest(rank=rank, cell_id="c", seq=0, number=number, prompt=f"{rank}? ")


def done(rank, status="ok"):
    return RankDone(rank=rank, cell_id="c", seq=1, status=status, seconds=0.0)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def turns(clock):
    return Turns(clock)


def test_requests_are_asked_one_at_a_time_in_order_of_arrival(turns, clock):
    for rank in (2, 0, 1):
        turns.take(request(rank))
    seen = []
    while (asked := turns.next()) is not None:
        assert turns.next() is None
        seen.append((asked.rank, turns.waiting))
        turns.answered()
        clock.advance(FOLLOW_SECONDS)
    assert seen == [(2, [0, 1]), (0, [1]), (1, [])]
    assert turns.is_idle


def test_answered_rank_that_asks_again_soon_comes_first(turns, clock):
    turns.take(request(0))
    turns.take(request(1))
    assert turns.next().rank == 0
    turns.answered()
    clock.advance(FOLLOW_SECONDS / 2)
    assert turns.next() is None
    assert not turns.is_idle
    turns.take(request(0, 2))
    assert turns.next().number == 2


def test_others_come_when_the_answered_rank_asks_no_more(turns, clock):
    turns.take(request(0))
    turns.take(request(1))
    turns.next()
    turns.answered()
    turns.take(done(0))
    assert turns.next().rank == 1


def test_request_of_a_rank_that_has_ended_is_withdrawn(turns):
    for rank in (0, 1, 0):
        turns.take(request(rank))
    assert turns.next().rank == 0
    turns.take(done(0, "lost"))
    assert turns.asked is None
    assert turns.next().rank == 1
    assert turns.waiting == []


def stream_of(events, closed):
    try:
        yield from events
    finally:
        closed.append(True)


def test_answers_are_posted_and_end_of_input_is_no_text():
    posted, closed = [], []

    def on_input(rank, prompt, password):
        if rank == 1:
            raise EOFError
        return prompt + str(password)

    events = [request(0), None, done(0), request(1), None, done(1)]
    shown = list(answering(stream_of(events, closed), on_input, lambda *post: posted.append(post)))
    assert [(rank, reply.number, reply.text) for rank, reply in posted] == [
        (0, 1, "0? False"),
        (1, 1, None),
    ]
    assert shown == [event for event in events if event is not None]
    assert closed == [True]


def test_answer_that_is_no_text_ends_the_cell_with_the_type_and_the_rank():
    closed = []
    with pytest.raises(TypeError, match=r"on_input\(rank=3, ...\) returned int: return the line"):
        list(answering(stream_of([request(3)], closed), lambda *_: 5, lambda *_: None))
    assert closed == [True]
