"""What is saved and said of a stopped run; the trainer is a stand-in."""

from pathlib import Path
from types import SimpleNamespace

from nbdist.errors import CheckpointError
from nbdist.train.autosave import save_stopped
from nbdist.train.saving import CheckpointConfig

DIRECTORY = Path("runs") / "a"


def trainer(save, **checkpoint):
    where = CheckpointConfig(directory=DIRECTORY, every_steps=5, **checkpoint)
    return SimpleNamespace(
        step=7,
        save=save,
        finish_saving=lambda: None,
        config=SimpleNamespace(checkpoint=where),
    )


def never():
    raise AssertionError("this step was not to be saved")


def test_stopped_run_is_saved_by_default_and_the_place_told():
    told = save_stopped(trainer(lambda: DIRECTORY / "step-7"), None)
    assert told.startswith(f"stopped after step 7; fit() goes on; saved {DIRECTORY / 'step-7'}, ")


def test_step_that_was_due_is_not_saved_twice():
    told = save_stopped(trainer(never), DIRECTORY / "step-7")
    assert f"saved {DIRECTORY / 'step-7'}" in told


def test_stop_without_saving_names_the_call_that_saves():
    told = save_stopped(trainer(never, save_on_stop=False), None)
    assert told.endswith("; trainer.save() writes a checkpoint of this step")


def test_run_that_cannot_be_saved_is_stopped_all_the_same():
    def full():
        raise CheckpointError("the disk is full; free some")

    told = save_stopped(trainer(full), None)
    assert told == "stopped after step 7; fit() goes on; the disk is full; free some"


def test_run_without_checkpoints_is_told_how_to_have_some():
    bare = SimpleNamespace(step=7, save=never, config=SimpleNamespace(checkpoint=None))
    assert "no checkpoint=CheckpointConfig(" in save_stopped(bare, None)
