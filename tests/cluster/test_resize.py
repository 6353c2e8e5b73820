"""The number of ranks changes: between cells, and when a rank dies inside `fit`."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager

import pytest

from nbdist import World
from nbdist.errors import (
    NbdistError,
    RankBusyError,
    RankLostError,
    RemoteCellError,
    StartError,
)
from nbdist.notebook.resized import resize

SETUP = """
import torch, torch.distributed as dist
from nbdist.train import *
data = TextData(shakespeare()[:60_000], vocab_size=300, context_length=32)
config = DecoderConfig(vocab_size=300, num_layers=2, hidden_size=48, context_length=32)

def build(mesh=None, **options):
    torch.manual_seed(0)
    model = parallelize(DecoderLM(config), build_mesh(mesh))
    return Trainer(model, data, TrainConfig(**{"num_steps": 4, **options}))

def go_on(trainer, num_steps):
    import dataclasses
    trainer.config = dataclasses.replace(trainer.config, num_steps=num_steps)
    return trainer.fit().losses

def seen(trainer):
    parts = [None] * world_size
    dist.all_gather_object(parts, trainer.data.sample_ids(trainer.step))
    return [one for part in parts for one in part]
"""
SUM = "total = torch.tensor([rank + 1.0]); dist.all_reduce(total); print(int(total), world_size)"


@pytest.fixture(scope="module")
def elastic():
    """A world whose number of ranks the tests change, one after another."""
    with World.start(2) as world:
        world.run(SETUP)
        yield world


def last(result):
    return {rank: text.strip().splitlines()[-1] for rank, text in result.text.items()}


def test_a_run_goes_on_with_more_and_with_fewer_ranks(elastic):
    world = elastic
    # As on two ranks throughout: the same global batches, gradients summed in another order.
    expected = last(world.run("other = build(num_steps=12); print(other.fit().losses)"))[0]
    order = last(world.run("print(seen(build()))"))[0]
    world.run("del other\nmine = rank\ntrainer = build(num_steps=12); go_on(trainer, 4)")
    world.push(pushed=[1, 2])
    pids = [info.pid for info in world.infos]

    grown = world.resize(3)

    assert (grown.before, grown.after, grown.places.new) == (2, 3, [2])
    assert grown.trainers == {"trainer": "memory of peers"}
    assert [info.pid for info in world.infos][:2] == pids
    assert set(last(world.run(SUM)).values()) == {"6 3"}
    assert last(world.run("print(mine, pushed, trainer.step, mesh.size())")) == {
        0: "0 [1, 2] 4 3", 1: "1 [1, 2] 4 3", 2: "0 [1, 2] 4 3",
    }  # fmt: skip
    assert last(world.run("trainer.step = 0; print(seen(trainer)); trainer.step = 4"))[2] == order
    world.run("go_on(trainer, 8)")
    steps = world.run("print(trainer.config.accumulation_steps, model_is := trainer.step)")
    assert last(steps)[2] == "1 8"

    shrunk = world.resize(1)

    assert (shrunk.places.leaving, shrunk.trainers) == ([1, 2], {"trainer": "memory of peers"})
    assert [info.pid for info in world.infos] == pids[:1]
    assert last(world.run(SUM)) == {0: "1 1"}
    result = world.run("print(go_on(trainer, 12)); print(trainer.config.accumulation_steps)")
    *_, losses, accumulation = result.text[0].strip().splitlines()
    assert accumulation == "2"  # 16 rows, where the two ranks had 8 at once
    numbers = [[float(x) for x in text.strip("[]").split(",")] for text in (losses, expected)]
    assert len(numbers[0]) == 12
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-4)


def test_the_command_says_what_it_has_done(elastic, capsys):
    resize(object(), elastic, 2)
    told = capsys.readouterr().out
    resize(object(), elastic, 2)

    assert "2 ranks, process group" in told
    assert "1 ranks made 2" in told
    assert "`trainer` is on the new mesh, its state from memory of peers" in told
    assert "has 2 ranks; nothing was done" in capsys.readouterr().out


def test_a_size_that_a_mesh_cannot_have_is_refused_before_anything(elastic):
    elastic.run("cut = build(MeshConfig(dp_shard=1, tp=2))")

    with pytest.raises(NbdistError, match=r"`cut`: mesh degrees .*: tp=2 = 2 cannot .*size=3"):
        elastic.resize(3)

    elastic.run("del cut")
    assert set(last(elastic.run(SUM)).values()) == {"3 2"}


@pytest.mark.parametrize("num_ranks", [0, True, "3"])
def test_a_size_that_is_no_number_of_ranks_is_refused(elastic, num_ranks):
    with pytest.raises(ValueError, match=r"is not a number of ranks; give an integer"):
        elastic.resize(num_ranks)


def test_ranks_that_cannot_be_started_leave_the_world_as_it_was(elastic, monkeypatch):
    def fail(*_args):
        raise StartError("no process", stage="heal")

    elastic.run("kept = build(); go_on(kept, 1)")
    with monkeypatch.context() as patch:
        patch.setattr("nbdist.cluster.resizing.start_processes", fail)
        with pytest.raises(StartError, match="no process"):
            elastic.resize(3)

    assert elastic.num_ranks == 2
    assert set(last(elastic.run(SUM)).values()) == {"3 2"}


def test_the_living_ranks_close_ranks_after_a_death(elastic):
    elastic.resize(3)
    elastic.run("mine = rank; replicas = build(MeshConfig(dp_replicate=3, dp_shard=1))")
    elastic.run("kept = build(); go_on(replicas, 1)")
    os.kill(elastic.infos[1].pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while 1 not in elastic.lost_ranks:
        assert time.monotonic() < deadline
        time.sleep(0.01)

    resized = elastic.resize(2)

    assert resized.places.moves == {2: 1}
    assert elastic.lost_ranks == frozenset()
    assert last(elastic.run("print(rank, world_size, mine)")) == {0: "0 2 0", 1: "1 2 2"}
    assert resized.trainers["replicas"] == "memory of peers"
    # A part of these weights was on the rank that died alone.
    assert "in no other rank's memory" in resized.behind["kept"]
    elastic.run("go_on(replicas, 2)")
    with pytest.raises(RemoteCellError, match="build a new Trainer"):
        elastic.run("go_on(kept, 2)")
    assert elastic.heal() == []


SLOW = """
import pathlib, time
def build_slow(reached, num_ranks):
    # slow until the number of ranks changes, which it is to be asked for at step 5
    def loss_fn(logits, targets):
        if trainer.step >= 5 and world_size == num_ranks:
            pathlib.Path(reached).touch()
            time.sleep(0.05)
        return next_token_loss(logits, targets)
    return build(num_steps=60, loss_fn=loss_fn)
"""


@contextmanager
def once_there(path, action):
    """Call `action` in a thread when a file is there; give a list of what it returns or raises."""
    found = []

    def wait():
        while not path.exists():
            time.sleep(0.01)
        try:
            found.append(action())
        except NbdistError as error:
            found.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    yield found
    thread.join()


def test_a_cell_that_trains_goes_on_with_more_ranks_after_its_step(elastic, tmp_path):
    world, reached = elastic, tmp_path / "reached"
    world.resize(2)
    world.run(SETUP + SLOW + "kept = replicas = None")
    expected = last(world.run("other = build(num_steps=60); print(other.fit().losses)"))[0]
    with once_there(reached, lambda: world.resize(3)) as found:
        result = world.run(
            f"del other\nbefore = rank\ntrainer = build_slow({str(reached)!r}, 2)\n"
            "history = trainer.fit()\n"
            "print(rank, before, world_size, trainer.step, len(history.records))\n"
            "print(history.losses)"
        )

    assert (found[0].before, found[0].after, found[0].behind) == (2, 3, {})
    lines = {rank: text.splitlines()[-2] for rank, text in result.text.items()}
    assert lines == {0: "0 0 3 60 60", 1: "1 1 3 60 60", 2: "2 0 3 60 60"}
    # the same global batches, gradients summed in another order
    assert losses(last(result)[2]) == pytest.approx(losses(expected), rel=1e-4)
    assert set(last(world.run(SUM)).values()) == {"6 3"}


def test_another_client_asks_for_fewer_ranks_of_a_cell_that_trains(elastic, tmp_path, capsys):
    world, reached = elastic, tmp_path / "reached"
    other = World.attach(world.world_id)
    told = []
    try:
        with once_there(reached, lambda: resize(object(), other, 2)):
            source = (
                f"trainer = build_slow({str(reached)!r}, 3)\ntrainer.fit()\n"
                "print(rank, world_size, trainer.step)"
            )
            for event in world.stream(source, timeout_seconds=100):
                told += [event.text] if event is not None and event.kind == "cell_note" else []
    finally:
        other._objects.close()
        other._link.close()

    assert "its notebook has been asked for 2 ranks" in capsys.readouterr().out
    assert "3 ranks made 2; the cell goes on" in told
    assert last(world.run("print(rank, world_size, trainer.step)")) == {0: "0 2 60", 1: "1 2 60"}


@pytest.mark.parametrize(
    ("cell", "why"),
    [
        ("pathlib.Path({0!r}).touch(); time.sleep(0.5); print('end')", "not inside fit()"),
        (
            "for _ in [0]:\n    trainer = build_slow({0!r}, 2)\n    trainer.fit()\nprint('end')",
            "in a loop",
        ),
    ],
)
def test_a_cell_that_cannot_go_on_is_left_alone(elastic, tmp_path, cell, why):
    reached = tmp_path / "reached"
    with once_there(reached, lambda: elastic.resize(3)) as found:
        result = elastic.run(cell.format(str(reached)))

    assert isinstance(found[0], RankBusyError)
    assert why in str(found[0])
    assert set(last(result).values()) == {"end"}
    assert elastic.num_ranks == 2


DYING = """
import os, signal
def build_dying(victims, step=7, mesh=None, **options):
    dies = rank in victims
    def loss_fn(logits, targets):
        if dies and holder[0].step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return next_token_loss(logits, targets)
    settings = {"num_steps": 12, "loss_fn": loss_fn, "max_failures": 99, **options}
    trainer = build(mesh, **settings)
    holder = [trainer]
    return trainer
"""


def losses(text):
    return [float(number) for number in text.strip("[]").split(",")]


def test_a_run_goes_on_without_the_rank_that_died(elastic):
    world = elastic
    world.resize(3)
    world.run(SETUP + DYING)
    expected = last(world.run("print(build(num_steps=12).fit().losses)"))[0]
    world.run("mine = rank; trainer = build_dying([1], on_failure='shrink')")

    # In a loop: nobody has to begin in its middle.
    result = world.run(
        "for _ in range(1):\n    found = trainer.fit().losses\n"
        "print(trainer.step, rank, world_size, mine)\nprint(found)"
    )

    assert {rank: text.splitlines()[-2] for rank, text in result.text.items() if text} == {
        0: "12 0 2 0", 2: "12 1 2 2",
    }  # fmt: skip
    assert losses(result.text[0].splitlines()[-1]) == pytest.approx(losses(expected), rel=1e-4)
    (incident,) = world.incidents
    assert (incident.outcome, incident.num_ranks, incident.step) == ("shrunk", 2, 7)
    assert incident.source == "memory of peers"
    assert world.num_ranks == 2
    assert [info.rank for info in world.infos] == [0, 1]
    assert world.lost_ranks == frozenset()
    assert last(world.run("print(rank, mine)")) == {0: "0 0", 1: "1 2"}
    assert set(last(world.run(SUM)).values()) == {"3 2"}


def test_a_rank_that_cannot_be_replaced_is_left_out(elastic, monkeypatch):
    def fail(*_args):
        raise StartError("no process", stage="heal")

    elastic.run("trainer = build_dying([0], on_failure='heal')")
    monkeypatch.setattr("nbdist.cluster.healing.start_processes", fail)
    result = elastic.run("print(trainer.fit().losses[-1], trainer.step, rank, world_size)")

    assert result.text[1].splitlines()[-1].split()[1:] == ["12", "0", "1"]
    assert elastic.incidents[-1].outcome == "shrunk"
    assert elastic.num_ranks == 1
    monkeypatch.undo()
    elastic.resize(2)
    elastic.run("trainer = build(num_steps=2); trainer.fit()")


def test_too_few_ranks_end_the_cell(elastic):
    elastic.run(SETUP + DYING)
    elastic.run("trainer = build_dying([1], on_failure='shrink', min_ranks=2)")

    with pytest.raises(RankLostError, match="killed by SIGKILL"):
        elastic.run("trainer.fit()")

    assert "1 ranks are left, but the run needs at least min_ranks=2" in (
        elastic.incidents[-1].outcome
    )
    assert (elastic.num_ranks, elastic.lost_ranks) == (2, {1})
