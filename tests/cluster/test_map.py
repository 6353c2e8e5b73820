"""`World.map`: order, balance, items that fail, ranks that die, Stop."""

import _thread
import os
import signal
import threading
import time
import warnings

import pytest

from nbdist import World
from nbdist.errors import CellInterrupted, ItemError, NbdistError, RankBusyError, RankLostError


@pytest.fixture(scope="module")
def world():
    with World.start(3) as started:
        yield started


def _deadly(item_of_death, pids):
    """Return a function whose item kills the ranks with these processes."""

    def work(item):
        if item == item_of_death and os.getpid() in pids:
            os.kill(os.getpid(), signal.SIGKILL)
        return item * 10

    return work


def test_results_come_in_order_from_all_ranks(world, capfd):
    def slow_at_first(item):
        time.sleep(0.02 if item < 5 else 0)
        return item * item, os.getpid()

    found = world.map(slow_at_first, range(100), batch=3)
    assert [value for value, _ in found] == [item * item for item in range(100)]
    assert {pid for _, pid in found} == {info.pid for info in world.infos}
    assert "100/100" in capfd.readouterr().err
    assert world.map(len, ["a", "bb"], ranks=[1], progress=False) == [1, 2]
    assert capfd.readouterr().err == ""
    assert world.map(len, []) == []


def test_a_slow_rank_does_less(world):
    slow = world.infos[0].pid

    def work(item):
        del item
        time.sleep(0.5 if os.getpid() == slow else 0.005)
        return os.getpid()

    counts = world.map(work, range(60), batch=1)
    # 60 items of 5 ms are done by the other two in the time of one or two items of 0.5 s
    assert 1 <= counts.count(slow) <= 10


def test_failing_item_is_named_and_the_ranks_go_on(world):
    def work(item):
        return 1 / (item - 37)

    with pytest.raises(ItemError, match=r"item 37 failed: rank \d raised ZeroDivisionError") as got:
        world.map(work, range(60), batch=4)
    assert got.value.index == 37
    assert got.value.done[36] == -1
    assert "in work" in got.value.traceback
    with pytest.raises(ItemError, match=r"item 1 failed: .*cannot pickle"):
        world.map(lambda item: threading.Lock() if item else 0, range(2))
    assert world.run("print('next')").text == dict.fromkeys(range(3), "next\n")


def test_bad_arguments_touch_no_rank(world):
    with pytest.raises(NbdistError, match=r"item 1 \(<unlocked _thread.lock.*cannot be sent"):
        world.map(print, [0, threading.Lock()])
    with pytest.raises(ValueError, match=r"map got batch=0; set batch >= 1"):
        world.map(print, [1], batch=0)
    with pytest.raises(ValueError, match=r"ranks 0 to 2"):
        world.map(print, [1], ranks=[3])
    stream = world.stream("import time; time.sleep(30)", ranks=[1])
    other = World.attach(world.world_id)
    try:
        next(stream)
        with pytest.raises(RankBusyError, match=r"map was not run: rank 1 runs another client"):
            other.map(print, [1])
    finally:
        stream.close()
        other._objects.close()
        other._link.close()


@pytest.mark.parametrize("by", ["Ctrl-C", "World.interrupt"])
def test_stop_ends_the_items_that_run_and_keeps_the_ranks(world, tmp_path, by):
    world.run("kept = rank")

    def work(item):
        (tmp_path / str(item)).touch()
        time.sleep(0 if item < 3 else 60)

    def interrupt_when_all_sleep():
        while len(list(tmp_path.iterdir())) < 6:
            time.sleep(0.01)
        world.interrupt() if by == "World.interrupt" else _thread.interrupt_main()

    threading.Thread(target=interrupt_when_all_sleep).start()
    started = time.monotonic()
    with pytest.raises(CellInterrupted, match=r"^3 of 30 items were done$"):
        world.map(work, range(30), batch=1)
    assert time.monotonic() - started < 40  # the items of 60 s were ended
    assert world.run("print(kept)").text == {0: "0\n", 1: "1\n", 2: "2\n"}
    assert world.map(abs, [-1, -2]) == [1, 2]


def test_items_of_a_dead_rank_are_done_by_the_others(world):
    before = {info.pid for info in world.infos}
    with pytest.warns(RuntimeWarning, match=r"rank 1 died during this map; 5 items that it had"):
        found = world.map(_deadly(1, [world.infos[1].pid]), range(1, 61), batch=5, ranks=[1, 2])
    assert found == [item * 10 for item in range(1, 61)]
    assert world.lost_ranks == {1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert world.map(abs, [-1, -2, -3]) == [1, 2, 3]  # on those that live
    assert world.heal() == [1]
    assert len({info.pid for info in world.infos} & before) == 2


def test_item_that_kills_its_ranks_is_named(world):
    pids = {info.pid for info in world.infos}
    with pytest.raises(
        RankLostError, match=r"item 7 was not done.*rank \d, \d died, and retries=1"
    ):
        world.map(_deadly(7, pids), range(30), batch=5)
    assert len(world.lost_ranks) == 2
    with pytest.raises(RankLostError, match=r"items were done, but no rank is left"):
        world.map(_deadly(3, pids), range(30), batch=5, retries=9)
