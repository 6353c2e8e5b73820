"""A rank dies inside `fit`; a new process takes its place, and the run ends as the unbroken one."""

from __future__ import annotations

import os
import signal
import time

import pytest

from nbdist import World
from nbdist.errors import RankLostError, RemoteCellError

NUM_STEPS = 12
SETUP = """
import dataclasses, os, signal
from pathlib import Path
import torch
from nbdist.train import *
data = TextData(shakespeare()[:60_000], vocab_size=300, context_length=32)
config = DecoderConfig(vocab_size=300, num_layers=2, hidden_size=48, context_length=32)

def die(flag):
    try:
        Path(flag).unlink()
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)

def build(strategy="zero3", die_in="", step=7, victims=(1,), **options):
    torch.manual_seed(0)
    cut = {strategy: world_size} if strategy in ("tp", "pp") else {}
    made = build_mesh(MeshConfig(dp_shard=1, **cut) if cut else None)
    flags = {r: f"{directory}/{r}" for r in victims if die_in}
    def loss_fn(logits, targets):
        value = next_token_loss(logits, targets)
        if holder and holder[0].step == step and rank in flags:
            if die_in == "forward":
                die(flags[rank])
            if die_in == "backward":
                value.register_hook(lambda _: die(flags[rank]))
        return value
    settings = {"num_steps": 12, "on_failure": "heal", "loss_fn": loss_fn,
                "max_failures": 99, **options}
    model = DecoderLM(dataclasses.replace(config, tie_embeddings=strategy != "pp"))
    model = parallelize(model, made, **({} if cut else {"strategy": strategy}))
    trainer = Trainer(model, data, TrainConfig(**settings))
    holder[:] = [trainer]
    if die_in == "optimizer" and rank in flags:
        trainer.optimizer.register_step_pre_hook(
            lambda *_: die(flags[rank]) if trainer.step == step else None)
    return trainer

holder = []
"""


@pytest.fixture(scope="module")
def healing():
    """A world of two ranks with a spare, whose ranks know `build`."""
    with World.start(2, spares=1) as world:
        world.run(SETUP)
        yield world


def prepare(world, tmp_path, victims=(1,)):
    """Arm the ranks that are to die, once each."""
    for rank in victims:
        (tmp_path / str(rank)).touch()
    world.push(directory=str(tmp_path))
    deadline = time.monotonic() + 60
    while world.record.settings.get("spares") and not world.num_spares_ready:
        assert time.monotonic() < deadline, "no spare came"
        time.sleep(0.05)


def _trainer():
    from IPython import get_ipython

    return get_ipython().user_ns["trainer"]


@pytest.fixture(scope="module")
def unbroken(healing):
    """The losses without a failure, by strategy."""
    found = {}
    for strategy in ("zero3", "ddp", "tp", "pp"):
        result = healing.run(f"trainer = build({strategy!r}); print(trainer.fit().losses)")
        found[strategy] = result.text[0].strip().splitlines()[-1]
    return found


@pytest.mark.parametrize(
    "case",
    ["zero3 forward 1", "zero3 backward 0", "zero3 optimizer 1", "ddp backward 1",
     "ddp optimizer 0", "tp backward 1", "pp optimizer 1"],
)  # fmt: skip
def test_the_run_ends_as_the_unbroken_one(healing, unbroken, tmp_path, case):
    strategy, phase, victim = case.split()
    victim = int(victim)
    prepare(healing, tmp_path, [victim])
    before, pids = len(healing.incidents), [info.pid for info in healing.infos]
    healing.run(f"trainer = build({strategy!r}, die_in={phase!r}, victims=[{victim}])\nmine = rank")
    result = healing.run(
        "history = trainer.fit()\nassert trainer.step == 12\n"
        "print(history.losses)\nprint('after', rank)"
    )
    for rank in (0, 1):
        *_, told, after = result.text[rank].strip().splitlines()
        assert told == unbroken[strategy]
        assert after == f"after {rank}"
    (incident,) = healing.incidents[before:]
    assert incident.is_healed
    assert incident.deaths == {victim: "killed by SIGKILL"}
    # The others had finished the step whose update the victim did not make.
    assert (incident.step, incident.steps_lost) == (7, int(phase == "optimizer"))
    assert incident.source == "memory of peers"
    assert [info.pid != pid for info, pid in zip(healing.infos, pids, strict=True)] == [
        rank == victim for rank in (0, 1)
    ]


def test_names_of_the_user_are_those_of_the_others(healing, tmp_path):
    prepare(healing, tmp_path)
    healing.run(
        "import threading\nlock = threading.Lock()\ndef twice(x):\n    return 2 * x\n"
        "trainer = build(die_in='forward'); model = trainer.model\nnumbers = [1, 2]"
    )
    result = healing.run(
        "with torch.enable_grad():\n    before = rank\n    trainer.fit()\n"
        "print(twice(21), numbers, model is trainer.model, 'lock' in globals(), before)"
    )
    ends = {rank: text.strip().splitlines()[-1] for rank, text in result.text.items()}
    assert ends == {0: "42 [1, 2] True True 0", 1: "42 [1, 2] True False 0"}
    assert "lock" in healing.incidents[-1].missing


def test_a_notebook_says_what_has_happened(healing, tmp_path):
    prepare(healing, tmp_path)
    healing.run("trainer = build(die_in='backward')")
    notes = [e for e in healing.stream("trainer.fit()") if e is not None and e.kind == "cell_note"]
    texts = [note.text for note in notes if not note.is_status]
    assert "rank 1 died: killed by SIGKILL; it is being replaced" in texts
    assert any("replaced, all go on after step 7 (0 steps done again)" in text for text in texts)
    assert [note.ranks for note in notes if note.ranks] == [(1,)]


@pytest.mark.parametrize("kind", ["OSError", "RuntimeError"])
def test_a_rank_that_raises_ends_the_cell_at_once(healing, kind):
    healing.run(
        "trainer = build()\nbatch = trainer.data.batch\n"
        f"def bad(step):\n    if rank == 1 and step == 3: raise {kind}('no file')\n"
        "    return batch(step)\nobject.__setattr__(trainer, 'data', type('D', (), {'batch': "
        "staticmethod(bad), 'num_validation_batches': 0})())"
    )
    before, started = len(healing.incidents), time.monotonic()
    with pytest.raises(RemoteCellError, match="no file"):
        healing.run("trainer.fit()")
    assert time.monotonic() - started < 4  # not the five seconds that a survivor waits for word
    assert len(healing.incidents) == before


def test_a_call_inside_a_function_ends_the_cell_as_without(healing, tmp_path):
    prepare(healing, tmp_path)
    healing.run("trainer = build(die_in='forward')\ndef train():\n    return trainer.fit()")
    with pytest.raises(RankLostError, match="killed by SIGKILL"):
        healing.run("train()")
    healing.heal()
    healing.run(SETUP)


def test_failures_beyond_the_limit_are_not_healed(healing, tmp_path):
    prepare(healing, tmp_path)
    healing.run("trainer = build(die_in='forward', max_failures=1)")
    with pytest.raises(RankLostError, match="killed by SIGKILL"):
        healing.run("trainer.fit()")
    healing.heal()
    healing.run(SETUP)


def test_a_stop_still_ends_all_ranks_after_the_same_step(healing, tmp_path):
    del tmp_path
    healing.run("trainer = build(num_steps=100_000)")
    with pytest.raises(KeyboardInterrupt, match="goes on"):
        stop_once_it_trains(healing)
    steps = healing.apply(_step)
    assert steps[0] == steps[1] > 0


def stop_once_it_trains(world):
    stream = world.stream("trainer.fit()")
    for event in stream:
        if event is not None and event.kind == "stream" and "loss" in event.text:
            break
    stream.throw(KeyboardInterrupt)  # once: a second one ends ranks inside a step
    for _ in stream:
        pass


def _step():
    return _trainer().step


def test_without_a_copy_the_newest_checkpoint_is_taken(tmp_path):
    with World.start(3) as world:
        world.run(SETUP)
        world.push(directory=str(tmp_path), place=str(tmp_path / "saved"))
        saving = "checkpoint=CheckpointConfig(directory=place, every_steps=3, async_save=False)"
        expected = world.run("trainer = build(); print(trainer.fit().losses)").text[0]
        for rank in (1, 2):
            (tmp_path / str(rank)).touch()
        world.run(f"trainer = build(die_in='optimizer', victims=(1, 2), {saving})")
        result = world.run("print(trainer.fit().losses)")
        (incident,) = world.incidents
        assert sorted(incident.deaths) == [1, 2]
        assert incident.source.endswith("step-00000006")
        assert (incident.step, incident.steps_lost) == (6, 2)  # rank 0 had finished the eighth
        assert result.text[0].splitlines()[-1] == expected.splitlines()[-1]


def test_a_new_rank_that_dies_while_it_joins_is_replaced_as_well(tmp_path):
    with World.start(2) as world:
        world.run(SETUP)
        world.push(directory=str(tmp_path))
        expected = world.run("trainer = build(); print(trainer.fit().losses)").text[0]
        (tmp_path / "1").touch()
        world.run("trainer = build(die_in='forward')")
        first, killed = world.infos[1].pid, False
        out = ""
        for event in world.stream("print(trainer.fit().losses)"):
            if event is not None and event.kind == "stream" and event.rank == 0:
                out += event.text
            now = world.infos[1].pid
            if not killed and now != first:
                os.kill(now, signal.SIGKILL)
                killed = True
        assert killed
        assert out.strip().splitlines()[-1] == expected.strip().splitlines()[-1]
        (incident,) = world.incidents
        assert incident.is_healed
