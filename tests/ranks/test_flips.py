"""One flipped bit in one replica ends `fit` on all ranks, with the rank and the tensor."""

import logging

import pytest
import torch

from nbdist.errors import StateMismatchError
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
    parallelize,
    shakespeare,
)
from nbdist.train.flips import digest
from nbdist.train.parallelize import bare

NAME = "layers.1.ffn.up.weight"


def _trainer(mesh, strategy, **change):
    data = TextData(shakespeare()[:12_000], vocab_size=264, context_length=12, seed=2)
    config = DecoderConfig(vocab_size=264, num_layers=2, hidden_size=24, context_length=12)
    model = parallelize(DecoderLM(config, seed=1), build_mesh(mesh), strategy=strategy)
    settings = {"num_steps": 8, "global_batch_size": 8, "check_every": 2, **change}
    return Trainer(model, data, TrainConfig(**settings))


def _flip(tensor):
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    local.view(torch.int32).view(-1)[3] ^= 1  # the lowest bit of one number


def _flip_later(trainer, find):
    """Flip a bit in the update of step 3, which no check follows at once."""
    done = []

    def flip(*_):
        if trainer.step == 2 and not done:
            done.append(_flip(find(trainer)))

    trainer.optimizer.register_step_post_hook(flip)


def _weight(trainer):
    return dict(bare(trainer.model).named_parameters())[NAME]


def _moment(trainer):
    return trainer.optimizer.state[_weight(trainer)]["exp_avg_sq"]


def flipped(rank, mesh, strategy, victim, directory):
    """Return the text of the error in the weights and in the state, the step, the losses after."""
    where = CheckpointConfig(directory=directory, every_steps=2)
    unbroken = _trainer(mesh, strategy, check_every=1).fit().losses
    broken = _trainer(mesh, strategy, checkpoint=where)
    if rank == victim:
        _flip_later(broken, _weight)
    with pytest.raises(StateMismatchError) as weights:
        broken.fit()
    step = broken.step
    resumed = broken.fit(resume=True).losses
    other = _trainer(mesh, strategy)
    if rank == victim:
        _flip_later(other, _moment)
    with pytest.raises(StateMismatchError) as state:
        other.fit()
    return str(weights.value), str(state.value), step, resumed == unbroken[2:]


CASES = {
    "ddp of 3": (3, MeshConfig(), "ddp", 1, "rank 1 has another `{}` than rank 0, 2;"),
    "hsdp": (
        4, MeshConfig(dp_replicate=2, dp_shard=2), "zero3", 2, "ranks 0, 2 have different `{}`;",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_flipped_bit_is_named_and_the_run_resumes_as_if_unbroken(case, tmp_path):
    world_size, mesh, strategy, victim, words = CASES[case]
    answers = run_ranks(flipped, world_size, mesh, strategy, victim, str(tmp_path))

    for weights, state, step, is_equal in answers:
        assert "compared after step 4 (check_every=2): " + words.format(NAME) in weights
        assert words.format(f"{NAME} (exp_avg_sq of the optimizer)") in state
        assert "go on from a checkpoint with fit(resume=True)" in weights
        assert (step, is_equal) == (4, True)


def without_copies(rank):
    """Return what is logged where no rank has a copy, and what a digest sees."""
    texts = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("nbdist.train.flips").addHandler(handler)
    _trainer(MeshConfig(), "zero3", num_steps=2).fit()
    seen = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.bool):
        tensor = torch.ones(3, 5, dtype=dtype).t()
        before = int(digest(tensor))
        tensor[2, 1] = 0
        seen.append(int(digest(tensor)) != before)
    return texts, seen


def test_check_every_says_that_it_compares_nothing_without_replicas():
    (texts, seen), (other, _) = run_ranks(without_copies, 2)

    assert [
        "check_every=2 compares nothing: no two ranks have equal weights" in t for t in texts
    ] == [True]
    assert other == []
    assert seen == [True] * 4
