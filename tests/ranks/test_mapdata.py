"""A trainer on a map-style data set equals one process; one rank of a host goes first."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

from nbdist.errors import NbdistError
from nbdist.testing import run_ranks
from nbdist.train import MapData, TrainConfig, Trainer, rank0_first

# float64: sums in another order differ by 1e-16 a term
TOLERANCE = 1e-12


class Noisy:
    """Points of a plane, with noise drawn anew in every epoch."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        x = torch.tensor([index, index % 3], dtype=torch.float64) / 10
        return x + torch.rand(2) / 100, x.sum().reshape(1)


def trained(rank):
    """Return the losses and the last validation loss, on uneven rows of ranks and validation."""
    torch.manual_seed(5)
    model = torch.nn.Linear(2, 1).double()
    initial = model.weight.detach().clone()
    data = MapData(Noisy(), validation=Noisy(), seed=1)
    config = TrainConfig(num_steps=7, global_batch_size=4, loss_fn=mse_loss, eval_every=7)
    history = Trainer(model, data, config).fit()
    return initial, history.losses, history.records[-1].validation_loss


def test_ranks_train_as_one_process():
    ((initial, expected, validation),) = run_ranks(trained, 1)

    for other, losses, other_validation in run_ranks(trained, 3):
        assert torch.equal(other, initial)
        assert losses == pytest.approx(expected, abs=TOLERANCE)
        assert other_validation == pytest.approx(validation, abs=TOLERANCE)


def downloaded(rank, directory, local_ranks):
    """Return what each rank found in the body, then how a failure on a first rank is told."""
    os.environ["LOCAL_RANK"] = str(local_ranks[rank])
    host = Path(directory, str(local_ranks[: rank + 1].count(0)))
    with rank0_first() as is_first:
        found = host.exists()
        if is_first:
            time.sleep(0.1)  # longer than the others need to get ahead, were they let
            host.touch()
    problem = ""
    try:
        with rank0_first() as is_first:
            if rank == 0:
                Path(directory, "missing").read_text()
    except (FileNotFoundError, NbdistError) as error:
        problem = f"{type(error).__name__}: {error}"
    dist.barrier()
    return found, problem


def test_one_rank_of_each_host_goes_first_and_its_failure_is_told(tmp_path):
    answers = run_ranks(downloaded, 4, str(tmp_path), [0, 1, 0, 1])

    assert [found for found, _ in answers] == [False, True, False, True]
    told = [problem for _, problem in answers]
    assert told[0].startswith("FileNotFoundError: ")
    assert told[2] == ""  # the first of its host: its body has ended well
    for rank in (1, 3):
        assert told[rank].startswith("NbdistError: rank0_first() was to run its body")
        assert "on rank 0, it raised FileNotFoundError: " in told[rank]
