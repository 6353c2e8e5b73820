"""`World.search`: groups side by side, pruning, ranks that die, errors, Stop."""

import _thread
import os
import signal
import threading
import warnings

import optuna
import pytest

from nbdist import World
from nbdist.errors import CellInterrupted, TrialError


@pytest.fixture(scope="module")
def world():
    """Four ranks; a search makes two groups of two of them."""
    with World.start(4) as started:
        yield started


def _grid(**values):
    return optuna.samplers.GridSampler(values, seed=0)


def _params(result):
    return sorted(tuple(trial.params.values()) for trial in result.study.trials)


def test_to_an_objective_its_group_is_the_world(world, tmp_path, capfd):
    world.run("base = 100 + rank")  # of the ranks: the client has no such name

    def objective(trial):
        x = trial.suggest_int("x", 0, 3)
        total = torch.ones(2) * (rank + 1)  # noqa: F821 - names of the ranks
        dist.all_reduce(total)
        trial.report(float(total[0]), 0)
        seen = [None] * world_size  # noqa: F821
        dist.all_gather_object(seen, (rank, base, mesh.size()))  # noqa: F821
        # until the other group is inside of a trial as well
        (tmp_path / str(base)).touch()  # noqa: F821
        while len(list(tmp_path.iterdir())) < 4:
            pass
        assert seen == [(0, seen[0][1], 2), (1, seen[0][1] + 1, 2)], seen
        assert float(total[0]) == 3.0
        return (x - 2) ** 2

    import torch
    import torch.distributed as dist

    result = world.search(objective, 4, groups=2, sampler=_grid(x=[0, 1, 2, 3]))
    assert _params(result) == [(0,), (1,), (2,), (3,)]
    assert "4/4" in capfd.readouterr().err
    groups = {trial.user_attrs["ranks"] for trial in result.study.trials}
    assert groups == {"0-1", "2-3"}
    assert result.best_params == {"x": 2}
    assert str(result).startswith("4 trials: 4 complete; best 0 (trial ")
    # all ranks are one group again, with their own names
    after = world.run(
        "import torch\nt = torch.ones(1)\ntorch.distributed.all_reduce(t)\n"
        "print(int(t), rank, world_size, mesh.size(), base)"
    )
    assert after.text == {r: f"4 {r} 4 4 {100 + r}\n" for r in range(4)}


def test_training_in_groups_is_pruned_and_compared(world):
    def objective(trial):
        from nbdist.train import (
            DecoderConfig,
            DecoderLM,
            TextData,
            TrainConfig,
            Trainer,
            shakespeare,
        )

        rate = trial.suggest_categorical("rate", [3e-2, 1e-9])
        torch.manual_seed(0)
        model = DecoderLM(
            DecoderConfig(vocab_size=280, num_layers=1, hidden_size=32, context_length=8)
        )
        data = TextData(shakespeare()[:8000], vocab_size=280, context_length=8)

        def look(record):
            trial.report(record.loss, record.step)
            if trial.should_prune():
                raise optuna.TrialPruned

        config = TrainConfig(
            num_steps=12, global_batch_size=4, warmup_steps=0, learning_rate=rate, on_step=look
        )
        return Trainer(model, data, config).fit().losses[-1]

    import torch

    result = world.search(
        objective,
        2,
        groups=2,
        sampler=_grid(rate=[3e-2, 1e-9]),
        pruner=optuna.pruners.ThresholdPruner(upper=5.5, n_warmup_steps=9),
        progress=False,
    )
    assert result.best_params == {"rate": 3e-2}
    states = {(trial.params["rate"], trial.state.name) for trial in result.study.trials}
    assert states == {(3e-2, "COMPLETE"), (1e-9, "PRUNED")}
    assert {t.last_step for t in result.study.trials if t.state.name == "PRUNED"} == {9}


def test_trial_of_a_dead_rank_is_tried_again_and_the_others_go_on(world, tmp_path):
    def objective(trial):
        x = trial.suggest_int("x", 0, 3)
        if rank == 1 and x == 2 and not (tmp_path / "died").exists():  # noqa: F821
            (tmp_path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        return pushed + x  # noqa: F821

    import torch.distributed as dist

    world.push(pushed=1000)
    before = {info.pid for info in world.infos}
    result = world.search(objective, 4, groups=2, sampler=_grid(x=[0, 1, 2, 3]), progress=False)
    states = [trial.state.name for trial in result.study.trials]
    assert sorted(states) == ["COMPLETE"] * 4 + ["FAIL"]
    [failed] = [trial for trial in result.study.trials if trial.state.name == "FAIL"]
    [again] = [trial for trial in result.study.trials if "retry_of" in trial.user_attrs]
    assert failed.params == again.params == {"x": 2}
    assert again.user_attrs["retry_of"] == failed.number
    assert "killed by SIGKILL" in failed.user_attrs["error"]
    assert result.best_value == 1000
    assert len({info.pid for info in world.infos} & before) == 3
    assert f"{failed.number}  " in str(result)
    assert world.lost_ranks == set()
    assert world.run("print(world_size, pushed)").text == dict.fromkeys(range(4), "4 1000\n")


def test_parameters_that_kill_their_rank_are_given_up(world):
    def objective(trial):
        if trial.suggest_int("x", 0, 1) == 0:
            os._exit(3)
        return 1.0

    result = world.search(
        objective, 2, ranks=[2, 3], sampler=_grid(x=[0, 1]), retries=0, progress=False
    )
    states = [(trial.params["x"], trial.state.name) for trial in result.study.trials]
    assert sorted(states) == [(0, "FAIL"), (1, "COMPLETE")]


def test_objective_that_raises_ends_the_search_or_only_its_trial(world):
    def objective(trial):
        x = trial.suggest_int("x", 0, 3)
        return 1 / (x - 2)

    sampler = _grid(x=[2])
    with pytest.raises(TrialError, match=r"trial 0 \(x=2\) failed: rank \d raised ZeroDivision"):
        world.search(objective, 9, groups=1, sampler=sampler, progress=False)
    assert len(world.last_search.study.trials) == 1
    result = world.search(
        objective, 4, groups=2, sampler=_grid(x=[0, 1, 2, 3]), keep_going=True, progress=False
    )
    assert result.best_params == {"x": 1}
    [failed] = [trial for trial in result.study.trials if trial.state.name == "FAIL"]
    assert "ZeroDivisionError" in failed.user_attrs["error"]
    # Optuna's own refusal reaches every rank, and the group of the next trial is whole
    with pytest.raises(TrialError, match=r"ValueError.*low <= high|`low <= high`"):
        world.search(lambda t: t.suggest_float("y", 2.0, 1.0), 1, groups=1, progress=False)
    with pytest.raises(TrialError, match=r"returned a NoneType, None; return the number"):
        world.search(lambda _: None, 1, groups=1, progress=False)


def test_collectives_that_differ_within_a_group_are_found(world):
    def objective(trial):
        x = trial.suggest_int("x", 0, 1)
        dist.all_reduce(torch.ones(2 + rank * x))  # noqa: F821
        return float(x)

    import torch
    import torch.distributed as dist

    result = world.search(
        objective, 4, groups=2, sampler=_grid(x=[0, 1]), keep_going=True, progress=False
    )
    for trial in result.study.trials:
        assert trial.state.name == ("FAIL" if trial.params["x"] else "COMPLETE")
        assert ("CollectiveMismatchError" in trial.user_attrs.get("error", "")) == trial.params["x"]


@pytest.mark.parametrize("by", ["Ctrl-C", "World.interrupt"])
def test_stop_ends_the_trials_and_keeps_the_study(world, tmp_path, by):
    def objective(trial):
        x = trial.suggest_int("x", 0, 100)
        if trial.number >= 2:
            (tmp_path / f"{trial.number}.{rank}").touch()  # noqa: F821
            if rank == 0:  # noqa: F821 - the others wait in a collective
                while True:
                    pass
            dist.barrier()
        return float(x)

    import torch.distributed as dist

    def stop_when_two_run():
        while len(list(tmp_path.iterdir())) < 4:
            pass
        world.interrupt() if by == "World.interrupt" else _thread.interrupt_main()

    threading.Thread(target=stop_when_two_run).start()
    with pytest.raises(
        CellInterrupted, match=r"^2 of 9 trials were done; they are in `last_search"
    ):
        world.search(objective, 9, groups=2, progress=False)
    stopped = world.last_search.study
    assert sorted(t.state.name for t in stopped.trials) == ["COMPLETE"] * 2 + ["FAIL"] * 2
    result = world.search(lambda _: -1.0, 2, study=stopped, groups=2, progress=False)
    assert len(result.study.trials) == 6
    assert result.best_value == -1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert world.run("print(world_size)").text == dict.fromkeys(range(4), "4\n")


def test_trial_that_takes_too_long_has_failed(world):
    def objective(trial):
        import time

        time.sleep(60 * trial.suggest_int("x", 0, 1))
        return 0.0

    result = world.search(
        objective, 2, ranks=[0], sampler=_grid(x=[0, 1]), timeout_seconds=2, progress=False
    )
    states = {trial.params["x"]: trial.state.name for trial in result.study.trials}
    assert states == {0: "COMPLETE", 1: "FAIL"}


def test_bad_arguments_touch_no_rank(world):
    before = world.infos[0].generation
    for arguments, text in [
        ({"num_trials": 0}, r"search got num_trials=0; set num_trials >= 1"),
        ({"groups": 3}, r"divide 4 ranks into groups=3 of equal size; set groups to one of \[1, 2"),
        ({"direction": "up"}, r"direction='up', which Optuna does not know; set direction="),
        ({"timeout_seconds": 0}, r"timeout_seconds=0; set it > 0"),
        ({"study": optuna.create_study(directions=["minimize"] * 2)}, r"2 directions, but an ob"),
        ({"study": optuna.create_study(), "direction": "maximize"}, r"a study has its own; leave"),
    ]:
        with pytest.raises(ValueError, match=text):
            world.search(abs, **({"num_trials": 1} | arguments))
    assert world.status()[0].generation == before
