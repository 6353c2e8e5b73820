"""The parameter server against a replay of its updates in one process."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

from nbdist.testing import run_ranks
from nbdist.train import (
    DecoderConfig,
    DecoderLM,
    TextData,
    TrainConfig,
    Trainer,
    shakespeare,
    train_asynchronously,
)
from nbdist.train.optim import build_optimizer

CONFIG = TrainConfig(num_steps=13, global_batch_size=6, warmup_steps=2)


def _start():
    torch.manual_seed(0)
    config = DecoderConfig(vocab_size=280, num_layers=2, hidden_size=32, context_length=12)
    data = TextData(shakespeare()[:8000], vocab_size=280, context_length=12)
    return DecoderLM(config).double(), data


def _flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _trained(rank):
    model, data = _start()
    history = train_asynchronously(model, data, CONFIG)
    return history, _flat(model)


def _replay(updates, num_workers):
    """Apply each gradient at the weights that its worker had, in the order of the server."""
    server, data = _start()
    worker, _ = _start()
    optimizer = build_optimizer(server, CONFIG)
    versions, taken = [_flat(server)], dict.fromkeys(range(1, num_workers + 1), 0)
    for version, update in enumerate(updates):
        seen = versions[version - update.staleness]
        torch.nn.utils.vector_to_parameters(seen.clone(), worker.parameters())
        rows = data.for_rank(global_batch_size=6, rank=update.worker - 1, world_size=num_workers)
        inputs, targets = rows.batch(taken[update.worker])
        taken[update.worker] += 1
        worker.zero_grad()
        CONFIG.loss_fn(worker(inputs), targets).backward()
        clip_grad_norm_(worker.parameters(), CONFIG.clip_norm)
        for p, own in zip(server.parameters(), worker.parameters(), strict=True):
            p.grad = own.grad
        for group in optimizer.param_groups:
            group["lr"] = CONFIG.learning_rate_at(version)
        optimizer.step()
        versions.append(_flat(server))
    return versions[-1]


def test_server_of_two_workers_equals_a_replay_of_its_updates():
    found = run_ranks(_trained, 3)
    history, weights = found[0]

    assert len(history.updates) == CONFIG.num_steps
    # float64: the same operations, but for the norm of the clip
    assert torch.allclose(weights, _replay(history.updates, 2), rtol=0, atol=1e-12)
    assert all(torch.equal(weights, other) and history == theirs for theirs, other in found)
    # the second worker's first push finds at least one update that it has not seen
    assert max(history.staleness) >= 1
    assert sum(history.staleness.values()) == CONFIG.num_steps
    assert len(history.plot().axes) == 2
    assert "13 updates, loss" in repr(history)


def _alone(rank):
    model, data = _start()
    history = train_asynchronously(model, data, CONFIG)
    texts = []
    for change in ({"eval_every": 4}, {"accumulation_steps": 2}):
        config = TrainConfig(num_steps=4, **change)
        with pytest.raises(ValueError, match="which it does not have") as caught:
            train_asynchronously(model, data, config)
        texts.append(str(caught.value))
    dist.barrier()
    return history, texts


def _synchronous(rank):
    model, data = _start()
    with pytest.raises(ValueError, match=re.escape("start 2 ranks or more")):
        train_asynchronously(model, data, CONFIG)
    return Trainer(model, data, CONFIG).fit().losses


def test_one_worker_is_never_stale_and_equals_the_trainer():
    history, texts = run_ranks(_alone, 2)[0]
    [losses] = run_ranks(_synchronous, 1)

    assert history.staleness == {0: CONFIG.num_steps}
    # the trainer shares its loss in float32
    assert history.losses == pytest.approx(losses, abs=1e-5)
    assert "eval_every=4" in texts[0]
    assert "accumulation_steps=2" in texts[1]
