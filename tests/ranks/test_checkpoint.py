"""Checkpoints on real ranks: exact resume, other world sizes, and kills in the middle."""

import logging
import os
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nbdist.errors import CheckpointError, RankLostError
from nbdist.testing import run_ranks
from nbdist.train import (
    CheckpointConfig,
    DecoderConfig,
    DecoderLM,
    MeshConfig,
    TextData,
    TrainConfig,
    Trainer,
    build_mesh,
    checkpoint,
    latest,
    list_checkpoints,
    manifest,
    shakespeare,
    verify,
)

NUM_STEPS = 30
# float64: another number of ranks sums in another order; Adam raises 1e-16 over 20 steps
TOLERANCE = 1e-10


class _Dropping(torch.nn.Module):
    """A model that draws random numbers: a resume is exact only if those go on too."""

    def __init__(self, p):
        super().__init__()
        self.inner = DecoderLM(
            DecoderConfig(vocab_size=280, num_layers=2, hidden_size=24, context_length=16)
        )
        self.config = self.inner.config
        self.dropout = torch.nn.Dropout(p)

    def forward(self, tokens):
        return self.dropout(self.inner(tokens))


def _trainer(
    directory,
    *,
    p=0.1,
    dtype=torch.float32,
    every_steps=10,
    num_steps=NUM_STEPS,
    mesh=None,
    **saving,
):
    where = directory and CheckpointConfig(directory=directory, every_steps=every_steps, **saving)
    return Trainer(
        _Dropping(p).to(dtype),
        TextData(shakespeare()[:20_000], vocab_size=280, context_length=16),
        TrainConfig(num_steps=num_steps, global_batch_size=6, warmup_steps=5, checkpoint=where),
        mesh=mesh,
    )


def _fit(rank, directory, options, resume):
    trainer = _trainer(directory, **options)
    losses = trainer.fit(resume=resume).losses
    weights = {name: p.full_tensor() for name, p in trainer.model.named_parameters()}
    return losses, weights, trainer.step


def _fit_noting_samples(rank, directory, options, resume):
    trainer = _trainer(directory, **options)
    rows, taken = trainer.data, []

    def noting_batch(step):
        taken.append((step, rows.sample_ids(step)))
        return rows.batch(step)

    trainer.data = SimpleNamespace(batch=noting_batch)
    losses = trainer.fit(resume=resume).losses
    weights = {name: p.full_tensor() for name, p in trainer.model.named_parameters()}
    return losses, taken, weights, trainer.step


def _keep_only_step_10(directory):
    for path in list_checkpoints(directory):
        if path.name != "step-00000010":
            shutil.rmtree(path)


@pytest.mark.parametrize("world_size", [2, 3])
def test_resumed_losses_equal_the_uninterrupted_run_bit_for_bit(tmp_path, world_size):
    options = {"num_steps": 60, "keep_last": 6}
    unbroken = run_ranks(_fit_noting_samples, world_size, tmp_path, options, False)
    kept = [path.name[-2:] for path in list_checkpoints(tmp_path)]
    assert kept == ["10", "20", "30", "40", "50", "60"]
    _keep_only_step_10(tmp_path)

    resumed = run_ranks(_fit_noting_samples, world_size, tmp_path, options, True)

    for (losses, taken, weights, _), (later, later_taken, later_weights, step) in zip(
        unbroken, resumed, strict=True
    ):
        assert len(later) == 50
        assert later == losses[10:]
        assert later_taken == taken[10:]
        assert step == 60
        assert all(torch.equal(weights[name], later_weights[name]) for name in weights)


@pytest.fixture(scope="module")
def two_rank_run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    options = {"p": 0.0, "dtype": torch.float64}
    losses, weights, _ = run_ranks(_fit, 2, directory, options, False)[0]
    _keep_only_step_10(directory)
    return directory, losses, weights


def _fit_and_log(rank, directory, options):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("nbdist.train").addHandler(handler)
    logging.getLogger("nbdist.train").setLevel(logging.INFO)
    losses, _, _ = _fit(rank, directory, options, "auto")
    return losses, lines


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_resume_goes_on_with_another_number_of_ranks(two_rank_run, tmp_path, world_size):
    source, losses, _ = two_rank_run
    shutil.copytree(source, tmp_path / "run")
    options = {"p": 0.0, "dtype": torch.float64}

    resumed, lines = run_ranks(_fit_and_log, world_size, tmp_path / "run", options)[0]

    assert resumed == pytest.approx(losses[10:], abs=TOLERANCE)
    reseeded = f"written by 2 ranks and is loaded by {world_size}: random states start anew"
    assert any(reseeded in line for line in lines) == (world_size != 2)


def _fit_on_mesh(rank, directory):
    mesh = build_mesh(MeshConfig(dp_replicate=2, dp_shard=2))
    trainer = _trainer(directory, p=0.0, dtype=torch.float64, mesh=mesh)
    return trainer.resume().losses, checkpoint.read_manifest(latest(directory)).mesh


def test_resume_goes_on_with_replicas(two_rank_run, tmp_path):
    source, losses, _ = two_rank_run
    shutil.copytree(source, tmp_path / "run")

    for resumed, mesh in run_ranks(_fit_on_mesh, 4, tmp_path / "run"):
        assert resumed == pytest.approx(losses[10:], abs=TOLERANCE)
        assert mesh == {"dp_replicate": 2, "dp_shard": 2}


def test_checkpoint_loads_into_a_whole_model_without_a_group(two_rank_run):
    directory, losses, _ = two_rank_run
    model = _Dropping(0.0).double()
    before = model.inner.embedding.weight.clone()

    found = checkpoint.load(latest(directory), model)

    assert not torch.equal(model.inner.embedding.weight, before)
    assert found.step == 10
    assert found.loss == losses[9]
    assert found.config["model"]["hidden_size"] == 24
    assert found.config["train"]["num_steps"] == NUM_STEPS
    text = Path(latest(directory), "tokenizer.json").read_text(encoding="utf-8")
    assert '"type":"BPE"' in text


def test_load_of_another_model_names_the_tensors(two_rank_run):
    other = torch.nn.Module()
    other.inner = DecoderLM(DecoderConfig(vocab_size=281, hidden_size=24, context_length=16))

    with pytest.raises(CheckpointError, match=r"holds another model: \d+ tensors differ") as caught:
        checkpoint.load(latest(two_rank_run[0]), other)

    text = str(caught.value)
    assert "`inner.embedding.weight` (checkpoint (280, 24), model (281, 24))" in text
    assert "`inner.layers.2.attention.key.weight` (checkpoint none, model (12, 24))" in text
    assert text.count("`") == 2 * 8
    assert "more; build the model with the configuration in its manifest.json" in text


def test_load_of_a_missing_checkpoint_says_where_to_look(tmp_path):
    with pytest.raises(CheckpointError, match=r"use a path that list_checkpoints\(directory\)"):
        checkpoint.load(tmp_path / "step-00000001", torch.nn.Linear(1, 1))


def _die(*_, **__):
    os._exit(9)


def _killed_in_second_save(rank, directory, stage):
    trainer = _trainer(directory, every_steps=2, num_steps=4, p=0.0)
    write = checkpoint.write

    def dying_write(snapshot, group=None):
        if snapshot.manifest.step == 4 and rank == 0:
            place = {
                "before writing": (checkpoint.state_dict_saver, "save"),
                "after the shards": (checkpoint, "write_text"),
                "before the manifest": (manifest, "write_text"),
                "before the rename": (manifest, "_sync_directory"),
            }[stage]
            setattr(*place, _die)
        return write(snapshot, group)

    checkpoint.write = dying_write
    trainer.fit()


@pytest.mark.parametrize(
    "stage", ["before writing", "after the shards", "before the manifest", "before the rename"]
)
def test_kill_during_a_save_leaves_the_one_before_as_newest(tmp_path, stage):
    with pytest.raises(RankLostError, match=r"rank 0 .* exit code 9"):
        run_ranks(_killed_in_second_save, 2, tmp_path, stage)

    assert latest(tmp_path).name == "step-00000002"
    assert any(".tmp-" in path.name for path in tmp_path.iterdir())
    options = {"every_steps": 2, "num_steps": 4, "p": 0.0}
    losses, _, _ = run_ranks(_fit, 2, tmp_path, options, True)[0]
    assert len(losses) == 2
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000002", "step-00000004"]


def _one_rank_cannot_write(rank, directory, policy, async_save):
    trainer = _trainer(
        directory, every_steps=2, num_steps=4, p=0.0, on_save_error=policy, async_save=async_save
    )
    write_text = checkpoint.write_text

    def full_disk(path, text):
        if "step-00000002" in str(path):
            raise OSError(28, "No space left on device")
        write_text(path, text)

    if rank == 1:
        checkpoint.write_text = full_disk
    told = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit()
        except CheckpointError as error:
            told = str(error)
    told += " ".join(str(w.message) for w in caught if w.category is RuntimeWarning)
    return told, trainer.step


def test_save_that_one_rank_cannot_write_fails_on_all(tmp_path):
    for text, step in run_ranks(_one_rank_cannot_write, 3, tmp_path, "stop", False):
        assert "checkpoint of step 2 was not saved" in text
        assert "rank 1 met OSError: [Errno 28] No space left on device (1 of 3 ranks" in text
        assert step == 2
    assert list_checkpoints(tmp_path) == []


def test_save_that_fails_in_the_background_is_told_and_training_goes_on(tmp_path):
    (told, step), other = run_ranks(_one_rank_cannot_write, 2, tmp_path, "warn", True)
    assert "checkpoint of step 2 was not saved" in told
    assert told.endswith("training goes on")
    assert step == 4
    assert other == ("", 4)
    # nothing of step 2 is left: the next save has swept it away
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000004"]


def test_save_that_fails_in_the_background_stops_all_ranks_together(tmp_path):
    found = run_ranks(_one_rank_cannot_write, 2, tmp_path, "stop", True)
    assert all("checkpoint of step 2 was not saved" in text for text, _ in found)
    assert found[0][1] == found[1][1] in (3, 4)
    assert list_checkpoints(tmp_path) == []


def test_flipped_bit_of_a_checkpoint_is_found(two_rank_run, tmp_path):
    source, _, _ = two_rank_run
    shutil.copytree(source, tmp_path / "run")
    path = latest(tmp_path / "run")
    assert verify(path).step == 10
    shard = path / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)

    with pytest.raises(CheckpointError, match=r"damaged: __1_0.distcp differs from the checksum"):
        verify(path)
    with pytest.raises(CheckpointError, match=r"damaged: __1_0.distcp differs"):
        run_ranks(_fit, 2, tmp_path / "run", {"p": 0.0, "dtype": torch.float64}, True)


def _errors(rank, directory):
    found = []
    for path, resume in [(directory, False), (directory / "none", True), (None, True)]:
        try:
            _trainer(path).fit(resume=resume)
        except (CheckpointError, ValueError) as error:
            found.append(str(error))
    return found


def test_fit_refuses_to_mix_runs_and_to_resume_from_nothing(two_rank_run):
    for mixed, missing, unset in run_ranks(_errors, 2, two_rank_run[0]):
        assert "step-00000010 is there already and this trainer is at step 0" in mixed
        assert 'call fit(resume="auto")' in mixed
        assert "that directory does not exist" in missing
        assert "TrainConfig.checkpoint is None; set checkpoint=CheckpointConfig(" in unset


def _auto_twice(rank, directory):
    trainer = _trainer(directory, p=0.0, every_steps=3, num_steps=6)
    first = list(trainer.fit(resume="auto").losses)  # nothing there: starts anew
    again = list(trainer.fit(resume="auto").losses)  # the cell is run again
    fresh = _trainer(directory, p=0.0, every_steps=3, num_steps=6).fit(resume="auto").losses
    return first, again, fresh


def test_running_the_cell_again_trains_nothing_twice(tmp_path):
    for first, again, fresh in run_ranks(_auto_twice, 2, tmp_path):
        assert len(first) == 6
        assert again == first
        assert fresh == []


def _goes_back(rank, directory):
    trainer = _trainer(directory, p=0.0, every_steps=2, num_steps=6, keep_last=3)
    first = list(trainer.fit().losses)
    trainer.load(directory / "step-00000002")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = list(trainer.fit().losses)  # sets 4 and 6 aside, saves others
    told = [str(w.message) for w in caught if "set aside" in str(w.message)]
    after_fit = [path.name for path in sorted(directory.iterdir())]
    trainer.load(directory / "step-00000002")
    trainer.step = 3  # a save without a fit before: of a step that the directory does not hold
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.save()
    told += [str(w.message) for w in caught if "set aside" in str(w.message)]
    fresh = _trainer(directory, p=0.0, every_steps=2, num_steps=3)
    fresh.fit(resume=True)
    return first, again, after_fit, told, fresh.step, [p.name for p in list_checkpoints(directory)]


def test_run_that_goes_back_loses_neither_its_new_checkpoints_nor_the_old_ones(tmp_path):
    found = run_ranks(_goes_back, 2, tmp_path)
    for first, again, after_fit, _, step, listed in found:
        assert again == first[2:]
        aside = ["step-00000004.aside1", "step-00000006.aside1"]
        names = ["step-00000002", "step-00000004", aside[0], "step-00000006", aside[1]]
        assert after_fit == names
        assert step == 3  # not that of step 6
        assert listed == ["step-00000002", "step-00000003"]
    at_fit, at_save = found[0][3]
    assert "goes on from step 2: the later checkpoints are set aside as step-00000004.a" in at_fit
    assert "is behind step-00000004.aside2, step-00000006.aside2, which were set aside" in at_save
    assert verify(tmp_path / "step-00000006.aside1").step == 6
