"""Stop ends a cell on all ranks in time, whatever it does, and leaves no process behind."""

import threading
import time

import psutil
import pytest

from nbdist import World
from nbdist.messages import CellNote

IMPORTS = """
import os, time, asyncio, torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
x = torch.ones(4)
"""
LOADERS = """
class Slow(Dataset):
    def __init__(self, seconds): self.seconds = seconds
    def __len__(self): return 10**6
    def __getitem__(self, i):
        time.sleep(self.seconds)
        return torch.ones(2)

def consume(loader):
    for number, batch in enumerate(loader):
        if number == 2: print("loads", flush=True)
"""
CELLS = {
    "loop": "print('on')\nwhile True: pass",
    "sleep": "print('on')\ntime.sleep(600)",
    "await": "print('on')\nawait asyncio.sleep(600)",
    "barrier": "print('on')\nif rank == 0: dist.barrier()\nwhile True: pass",
    "all_reduce": "print('on')\nif rank == 1: dist.all_reduce(x)\ntime.sleep(600)",
    "recv": "print('on')\ndist.recv(x, 1 - rank)",
    "loader": "consume(DataLoader(Slow(0.001), batch_size=4, num_workers=2))",
    "loader at the top": "for batch in DataLoader(Slow(0.001), num_workers=2): print('on')",
    "persistent loader": "many = dict(num_workers=2, persistent_workers=True)\n"
    "loader = DataLoader(Slow(0.001), **many)\nconsume(loader)",
    "loader that hangs": "print('on')\nconsume(DataLoader(Slow(600), num_workers=2))",
}


def stop_soon(world, source, interrupt=None):
    """Run a cell, stop it once it has printed, and return what it yielded and the seconds."""
    stream = world.stream(source)
    events, stopped_at = [], 0.0
    while (event := next_or_stopped(stream)) != "stopped":
        events.append(event)
        if not stopped_at and getattr(event, "text", "").strip():
            stopped_at = time.monotonic()
            threading.Timer(0.2, interrupt or world.interrupt).start()
    return events, time.monotonic() - stopped_at - 0.2


def next_or_stopped(stream):
    try:
        return next(stream)
    except KeyboardInterrupt:
        return "stopped"


@pytest.fixture(scope="module")
def stop_world(world):
    """A world whose ranks know the names that the cells use."""
    world.run(IMPORTS + LOADERS + "import nbdist.train")
    return world


@pytest.mark.parametrize("kind", list(CELLS))
def test_stop_ends_the_cell_in_two_seconds_with_its_workers(stop_world, kind):
    stop_world.run("kept = rank + 5")
    children = {p: psutil.Process(p).children() for p in (i.pid for i in stop_world.infos)}

    _, seconds = stop_soon(stop_world, CELLS[kind])

    assert seconds < 2
    assert {p: psutil.Process(p).children() for p in children} == children
    started = time.monotonic()
    found = stop_world.run("x = torch.ones(1); dist.all_reduce(x); print(int(x), kept)").text
    assert found == {0: "2 5\n", 1: "2 6\n"}
    assert time.monotonic() - started < 2
    if kind == "persistent loader":
        again = "print(next(iter(loader)).tolist()); loader._iterator._shutdown_workers()"
        assert stop_world.run(again).text[0] == "[[1.0, 1.0]]\n"


def test_stop_from_another_client_frees_and_ends_the_cell(stop_world):
    other = World.attach(stop_world.world_id)
    try:
        _, seconds = stop_soon(stop_world, CELLS["barrier"], other.interrupt)
    finally:
        other._link.close()
    assert seconds < 2
    assert stop_world.run("print(1)").text == {0: "1\n", 1: "1\n"}


STEP = """
from nbdist.train.interrupt import StopRequest
with StopRequest() as stop:
    dist.barrier()
    print("on")
    for step in range(3):
        asked = torch.tensor([float(stop.asked)])
        {work}
        dist.all_reduce(asked)
        if asked.item(): break
    ended_at = step
raise KeyboardInterrupt(f"stopped after step {{step}}")
"""


def test_stop_waits_for_a_long_step_and_ends_all_ranks_after_it(stop_world):
    generation = stop_world.status()[0].generation
    source = STEP.format(work="time.sleep(2.5 if rank else 0)")

    events, seconds = stop_soon(stop_world, source)

    assert 1.5 < seconds < 6  # longer than a cell that does not say when it stops may take
    notes = [event.text for event in events if isinstance(event, CellNote)]
    assert "the ranks stop together after the running step; Stop again ends" in notes[-1]
    assert len(set(stop_world.run("print(ended_at)").text.values())) == 1
    assert stop_world.status()[0].generation == generation


def test_second_stop_cuts_a_step_short(stop_world):
    stream = stop_world.stream(STEP.format(work="time.sleep(600)"))
    told = False
    while (event := next_or_stopped(stream)) != "stopped":
        if getattr(event, "text", "").strip() == "on" and not told:
            told = True
            stop_world.interrupt()
        elif isinstance(event, CellNote) and "Stop again" in event.text:
            again = time.monotonic()
            stop_world.interrupt()
    assert time.monotonic() - again < 2
    assert stop_world.run("print(1)").text == {0: "1\n", 1: "1\n"}


def test_rank_that_raises_while_a_trainer_stops_frees_the_others(stop_world):
    source = STEP.format(work="if rank and stop.asked: raise ValueError('mine')")
    source = source.replace("range(3)", "range(10**9)").replace("if asked.item()", "if False")
    _, seconds = stop_soon(stop_world, source)
    assert seconds < 3
    assert stop_world.run("print(1)").text == {0: "1\n", 1: "1\n"}


TRAIN = """
from nbdist.train import *
data = TextData(shakespeare()[:20_000], vocab_size=280, context_length=16, seed=2)
small = DecoderConfig(vocab_size=280, num_layers=1, num_heads=2, num_kv_heads=2, hidden_size=16,
                      context_length=16)
def trainer_of(num_steps, **checkpoint):
    where = CheckpointConfig(directory={directory!r}, every_steps=10**9, **checkpoint)
    config = TrainConfig(num_steps=num_steps, global_batch_size=4, checkpoint=where)
    return Trainer(DecoderLM(small), data, config)
"""


def test_stopped_training_is_saved_and_resumed_by_a_new_trainer(stop_world, tmp_path):
    stop_world.run(TRAIN.format(directory=str(tmp_path)))
    stop_world.run("trainer = trainer_of(10**9)")
    threading.Timer(1.5, stop_world.interrupt).start()

    with pytest.raises(KeyboardInterrupt, match=r"stopped after step \d+; fit\(\) goes on; saved "):
        stop_world.run("trainer.fit()")

    (saved,) = tmp_path.iterdir()
    steps = stop_world.run("print(trainer.step)").text
    assert set(steps.values()) == {f"{int(saved.name.removeprefix('step-'))}\n"}
    resumed = "again = trainer_of(trainer.step + 2); print(len(again.resume().losses))"
    assert {text.splitlines()[-1] for text in stop_world.run(resumed).text.values()} == {"2"}


def test_second_stop_while_a_stopped_run_is_saved_leaves_no_checkpoint(stop_world, tmp_path):
    stop_world.run(TRAIN.format(directory=str(tmp_path)))
    stop_world.run("trainer = trainer_of(10**9)")
    slow = """
import time
from nbdist.train import checkpoint
publish = checkpoint.publish
def never(*args, **kwargs): print("saves", flush=True); time.sleep(600)
checkpoint.publish = never
"""
    stream = stop_world.stream(slow + "trainer.fit()")
    timer = threading.Timer(1.5, stop_world.interrupt)
    timer.start()
    again = 0.0
    while (event := next_or_stopped(stream)) != "stopped":
        if not again and "saves" in getattr(event, "text", ""):
            again = time.monotonic()
            stop_world.interrupt()
    assert time.monotonic() - again < 2
    stop_world.run("checkpoint.publish = publish")
    listed = f"print(list_checkpoints({str(tmp_path)!r}))"
    assert stop_world.run(listed).text == {0: "[]\n", 1: "[]\n"}
