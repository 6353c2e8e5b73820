"""Background saves on real ranks: what is saved, one at a time, and a copy that fails."""

import threading

import pytest
import torch

from nbdist.testing import run_ranks
from nbdist.train import (
    CheckpointConfig,
    DecoderConfig,
    DecoderLM,
    TextData,
    TrainConfig,
    Trainer,
    checkpoint,
    latest,
    list_checkpoints,
    shakespeare,
)


class _Counting(torch.nn.Module):
    """A model whose forward changes a buffer."""

    def __init__(self):
        super().__init__()
        self.inner = DecoderLM(DecoderConfig(vocab_size=270, num_layers=1, hidden_size=16))
        self.register_buffer("seen", torch.zeros(3))
        self.average = torch.nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, tokens):
        if self.training:
            self.seen += 1
        return self.inner(tokens)


def _average(model, *_):
    """Change a weight that the optimizer does not have; after forward, as it is sharded then."""
    with torch.no_grad():
        model.average.to_local().add_(1)


def _trainer(directory, *, every_steps, num_steps):
    where = CheckpointConfig(directory=directory, every_steps=every_steps, keep_last=9)
    trainer = Trainer(
        _Counting(),
        TextData(shakespeare()[:8_000], vocab_size=270, context_length=16),
        TrainConfig(num_steps=num_steps, global_batch_size=4, warmup_steps=1, checkpoint=where),
    )
    trainer.model.register_forward_hook(_average)
    return trainer


def _state(trainer):
    values = {**trainer.model.state_dict()}
    for name, parameter in trainer.model.named_parameters():
        for key, value in trainer.optimizer.state.get(parameter, {}).items():
            values[f"{name}.{key}"] = value
    return {n: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone()
            for n, v in values.items()}  # fmt: skip


def _copied_late(directory):
    """Save step 2 with a copy that begins after the gradients of step 3 are there."""
    trainer = _trainer(directory, every_steps=2, num_steps=3)
    saver, states, gradients_are_there = trainer._saver, {}, threading.Event()
    save, before_update = saver.save, saver.before_update

    def noting_save(snapshot):
        states[snapshot.manifest.step] = _state(trainer)
        steady = type(snapshot).steady_part

        def late_part(self):
            gradients_are_there.wait()
            return steady(self)

        with pytest.MonkeyPatch.context() as patch:
            if snapshot.manifest.step == 2:
                patch.setattr(type(snapshot), "steady_part", late_part)
            return save(snapshot)

    def telling_update():
        gradients_are_there.set()
        before_update()

    saver.save, saver.before_update = noting_save, telling_update
    trainer.fit()
    first = list_checkpoints(directory)[0]
    loaded = _trainer(directory, every_steps=2, num_steps=3)
    loaded.load(first)
    return first.name, states[2], _state(loaded), states[3]


def _one_at_a_time(directory):
    """Save every step; each write ends after the next save was asked for."""
    trainer = _trainer(directory, every_steps=1, num_steps=4)
    saver, events = trainer._saver, []
    asked = [threading.Event() for _ in range(6)]
    save, settle, write = saver.save, saver.settle, checkpoint.write

    def telling_save(snapshot):
        asked[snapshot.manifest.step].set()
        return save(snapshot)

    def telling_settle():
        if trainer.step == 4:
            asked[5].set()
        settle()

    def late_write(snapshot, group=None):
        step = snapshot.manifest.step
        events.append(f"begin {step}")
        asked[step + 1].wait()
        path = write(snapshot, group)
        events.append(f"end {step}")
        return path

    saver.save, saver.settle = telling_save, telling_settle
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "write", late_write)
        trainer.fit()
    return events


def _failing_copy(directory):
    """Fit with a copy that fails; then again with one that does not."""
    trainer = _trainer(directory, every_steps=2, num_steps=3)

    def fail(self):
        raise MemoryError("no room for the copy")

    told = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.Snapshot, "steady_part", fail)
        try:
            trainer.fit()
        except MemoryError as error:
            told = str(error)
    stopped_at = trainer.step
    trainer.fit()
    return told, stopped_at, trainer.step, latest(directory).name


def _checks(rank, directory):
    return {
        check.__name__: check(directory / check.__name__)
        for check in (_copied_late, _one_at_a_time, _failing_copy)
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_ranks(_checks, 2, tmp_path_factory.mktemp("saves"))


def test_checkpoint_holds_the_state_at_the_save_although_training_goes_on(found):
    for each in found:
        name, at_save, loaded, later = each["_copied_late"]
        assert name == "step-00000002"
        assert at_save.keys() == loaded.keys()
        # exactly: a checkpoint is a copy
        assert all(torch.equal(at_save[name], loaded[name]) for name in at_save)
        unchanged = [name for name in at_save if torch.equal(at_save[name], later[name])]
        assert unchanged == []


def test_two_saves_never_run_at_once(found):
    for each in found:
        assert each["_one_at_a_time"] == [
            f"{what} {step}" for step in (1, 2, 3, 4) for what in ("begin", "end")
        ]


def test_copy_that_fails_ends_fit_before_the_weights_change(found):
    for each in found:
        told, stopped_at, step, newest = each["_failing_copy"]
        assert told == "no room for the copy"
        assert stopped_at == 2
        assert (step, newest) == (3, "step-00000003")
