"""Single items through one forward: equal, merged, and one bad item alone."""

from __future__ import annotations

import threading
from concurrent.futures import wait

import pytest
import torch

from nbdist.errors import Overloaded, ServeError
from nbdist.serve import BatchedModule


class Doubler(torch.nn.Module):
    """Doubles; refuses batches with a negative number; notes the batch sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def forward(self, x):
        if (x < 0).any():
            raise ValueError("a negative number came")
        self.sizes.append(len(x))
        return x * 2


class Gate(Doubler):
    """Holds the first forward until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.opened = threading.Event(), threading.Event()

    def forward(self, x):
        self.entered.set()
        assert self.opened.wait(20)
        return super().forward(x)


@pytest.fixture
def make():
    made = []

    def build(module, **options):
        made.append(BatchedModule(module, **options))
        return made[-1]

    yield build
    for one in made:
        one.close()


def test_items_that_come_together_share_forwards_and_equal_single_calls(make):
    linear = torch.nn.Linear(4, 3).eval()
    batched = make(linear, max_batch=8, window_seconds=0.05)
    items = list(torch.randn(32, 4))

    futures = [batched.submit(item) for item in items]

    for item, future in zip(items, futures, strict=True):
        # another batch size may sum in another order
        torch.testing.assert_close(future.result(20), linear(item).detach())
    assert batched.mean_batch_size > 1
    assert batched.num_items == 32


def test_items_of_other_shapes_wait_for_none_of_these(make):
    module = Doubler()
    batched = make(module, max_batch=4, window_seconds=0.05)
    futures = [batched.submit(torch.ones(1 + n % 2)) for n in range(6)]
    wait(futures, 20)

    assert [tuple(future.result().shape) for future in futures] == [(1,), (2,)] * 3
    assert sum(module.sizes) == 6
    assert max(module.sizes) <= 4


def test_bad_item_fails_alone(make):
    batched = make(Doubler(), window_seconds=0.05)
    futures = [batched.submit(torch.tensor([n])) for n in (1.0, -1.0, 3.0)]

    assert futures[0].result(20).item() == 2
    assert futures[2].result(20).item() == 6
    with pytest.raises(ValueError, match="a negative number came"):
        futures[1].result(20)


def test_buckets_pad_lengths_into_one_forward(make):
    module = Gate()
    batched = make(module, buckets=(4, 8), pad_value=1)
    first = batched.submit(torch.zeros(8))
    assert module.entered.wait(20)
    futures = [batched.submit(torch.zeros(n)) for n in (2, 3, 4)]
    module.opened.set()

    assert first.result(20).shape == (8,)
    assert [f.result(20).tolist() for f in futures] == [[0, 0, 2, 2], [0, 0, 0, 2], [0, 0, 0, 0]]
    assert module.sizes == [1, 3]
    with pytest.raises(ValueError, match="largest bucket is 8"):
        batched.submit(torch.zeros(9))


def test_answers_of_several_tensors_are_split_by_item(make):
    class Two(torch.nn.Module):
        def forward(self, x):
            return {"sum": x.sum(1), "pair": (x, x + 1)}

    answer = make(Two())(torch.tensor([1.0, 2.0]), 20)

    assert answer["sum"].item() == 3
    assert answer["pair"][1].tolist() == [2, 3]


@pytest.mark.parametrize(
    ("answer", "text"),
    [(torch.zeros(()), "must begin with the batch dimension"), ("text", "gave a str")],
)
def test_answer_that_cannot_be_split_says_so(make, answer, text):
    class Odd(torch.nn.Module):
        def forward(self, x):
            return answer

    with pytest.raises(ServeError, match=text):
        make(Odd())(torch.zeros(2), 20)


def test_items_beyond_the_limit_are_refused_and_the_others_are_answered(make):
    module = Gate()
    batched = make(module, max_waiting=2)
    first = batched.submit(torch.ones(1))
    assert module.entered.wait(20)
    waiting = [batched.submit(torch.ones(1)) for _ in range(2)]
    with pytest.raises(Overloaded, match="max_waiting=2"):
        batched.submit(torch.ones(1))
    module.opened.set()

    assert [future.result(20).item() for future in [first, *waiting]] == [2, 2, 2]


def test_cancelled_item_is_left_out(make):
    module = Gate()
    batched = make(module)
    batched.submit(torch.ones(1))
    assert module.entered.wait(20)
    gone, kept = batched.submit(torch.ones(1)), batched.submit(torch.ones(1))
    assert gone.cancel()
    module.opened.set()

    assert kept.result(20).item() == 2
    assert module.sizes == [1, 1]


def test_close_answers_what_was_sent_and_takes_no_more():
    batched = BatchedModule(Doubler())
    futures = [batched.submit(torch.ones(1)) for _ in range(5)]
    batched.close()

    assert [future.result(0).item() for future in futures] == [2] * 5
    with pytest.raises(ServeError, match="was closed"):
        batched.submit(torch.ones(1))


def test_batched_module_of_no_item_is_refused():
    with pytest.raises(ValueError, match="max_batch=0"):
        BatchedModule(Doubler(), max_batch=0)
