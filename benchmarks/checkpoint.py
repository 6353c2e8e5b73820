"""Save, stall and load of a checkpoint: nbdist against `torch.save` and plain DCP, in turns.

Two ranks share a model and Adam's state, 500 MB in all. In each turn every way saves and loads the
same state into the same directory, so that a busy disk slows all. `torch.save` is rank 0 alone
writing what it has gathered before (the gathering is not counted). nbdist's files carry checksums,
are written through to the disk, and are checked while they are loaded; the others are not.

The stall of a background save is what `save` takes and what the next step then waits, before its
update, for the copy of the state; that step computes gradients of 128 rows meanwhile. "stall, at
once" waits with nothing to compute. "step" and "step after save" tell what the threads of a save
take from that step.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from nbdist.testing import run_ranks
from nbdist.train import CheckpointConfig, build_mesh, checkpoint, parallelize
from nbdist.train.saving import Saver

if TYPE_CHECKING:
    from collections.abc import Callable

WANTED_STALL = 0.1  # of the time of torch.save
WIDTH = 1024
NUM_ROWS = 128


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that the slowest rank took."""
    dist.barrier()
    started = time.perf_counter()
    work()
    return slowest(time.perf_counter() - started)


def slowest(seconds: float) -> float:
    """Return the most that a rank says."""
    most = torch.tensor(seconds)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most)


def gradients(model: nn.Module, rows: torch.Tensor) -> None:
    """Compute a step's gradients and drop them."""
    model(rows).sum().backward()
    model.zero_grad()


def built(megabytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a sharded model with Adam's state, so many megabytes over all ranks."""
    num_layers = max(1, round(megabytes * 2**20 / (3 * 4 * WIDTH * WIDTH)))
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers))
    model = parallelize(nn.Sequential(*layers), build_mesh())
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def turn(model: nn.Module, optimizer: torch.optim.Optimizer, where: Path, savers: dict[str, Saver],
         whole: Any) -> dict[str, float]:  # fmt: skip
    """Save and load once in every way; return seconds by way."""
    seconds: dict[str, float] = {}
    is_first = dist.get_rank() == 0

    def snapshot(step: int) -> checkpoint.Snapshot:
        return checkpoint.take(
            where, step=step, model=model, optimizer=optimizer, mesh={"dp_shard": 2}, keep_last=1
        )

    def plain() -> dict[str, Any]:
        weights, state = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": state}

    def dcp_save() -> None:
        state_dict_saver.save(plain(), checkpoint_id=where / "dcp")

    def dcp_load() -> None:
        state_dict_loader.load(plain(), checkpoint_id=where / "dcp")

    def torch_save() -> None:
        if is_first:
            torch.save(whole, where / "whole.pt")

    def torch_load() -> None:
        if is_first:
            torch.load(where / "whole.pt")

    if is_first:
        shutil.rmtree(where / "dcp", ignore_errors=True)
    for name, work in (("torch.save", torch_save), ("torch.load", torch_load),
                       ("DCP save", dcp_save), ("DCP load", dcp_load)):  # fmt: skip
        seconds[name] = timed(work)
    seconds["collect"] = timed(lambda: snapshot(1))
    seconds["save"] = timed(lambda: savers["sync"].save(snapshot(1)))
    background = savers["async"]
    background.save(snapshot(2))
    background.before_update()
    seconds["stall, at once"] = slowest(background.stall_seconds)
    background.wait()
    rows = torch.ones(NUM_ROWS, WIDTH)
    seconds["step"] = timed(lambda: gradients(model, rows))
    background.save(snapshot(2))
    seconds["step after save"] = timed(lambda: gradients(model, rows))
    background.before_update()
    seconds["async stall"] = slowest(background.stall_seconds)
    seconds["async rest"] = timed(background.wait)
    path = where / "step-00000002"
    seconds["load"] = timed(lambda: checkpoint.load(path, model, optimizer))
    return seconds


def measure(rank: int, directory: str, megabytes: int, repeats: int) -> dict[str, Any]:
    """Take turns; return medians, and by how much the peak of the memory grew in them."""
    where = Path(directory)
    model, optimizer = built(megabytes)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_state_dict(model, optimizer, options=options)
    savers = {
        name: Saver(CheckpointConfig(directory=where, async_save=name == "async"))
        for name in ("sync", "async")
    }
    turns = []
    for number in range(repeats + 1):
        found = turn(model, optimizer, where, savers, whole)
        if number:  # the first one makes groups, directories and pages of memory
            turns.append(found)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "medians": {name: statistics.median(t[name] for t in turns) for name in turns[0]},
        "stalls": [t["async stall"] / t["torch.save"] for t in turns],
        "peak MB": peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", help="where to write; default: the temporary directory")
    parser.add_argument("--json", action="store_true", help="on one line")
    arguments = parser.parse_args()
    where = tempfile.mkdtemp(prefix="nbdist-checkpoint-", dir=arguments.directory)
    try:
        found = run_ranks(
            measure, 2, where, arguments.megabytes, arguments.repeats, timeout_seconds=900
        )[0]
    finally:
        shutil.rmtree(where)
    seconds = found["medians"]
    ratio = statistics.median(found["stalls"])
    found["stall / torch.save"] = ratio
    found["wanted"] = f"stall <= {WANTED_STALL:g} of torch.save"
    found["save / DCP save"] = seconds["save"] / seconds["DCP save"]
    found["load / DCP load"] = seconds["load"] / seconds["DCP load"]
    print(json.dumps(found, indent=None if arguments.json else 1))


if __name__ == "__main__":
    main()
