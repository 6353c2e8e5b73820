"""Local SGD and DiLoCo against the same formulas in one process."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from nbdist.testing import run_ranks
from nbdist.train import (
    CommunicationConfig,
    DecoderConfig,
    DecoderLM,
    TextData,
    TrainConfig,
    Trainer,
    WireCounter,
    build_mesh,
    parallelize,
    shakespeare,
)
from nbdist.train.communication import LocalSGD

STEPS = 12


def _model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
    ).double()


def _rows(step, rank):
    noise = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(4, 6, generator=noise, dtype=torch.float64)
    return inputs, torch.randint(3, (4,), generator=noise)


def _gradients(model, step, rank):
    model.zero_grad()
    inputs, targets = _rows(step, rank)
    functional.cross_entropy(model(inputs), targets).backward()


def _flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _local(rank, make, steps, **options):
    model = _model()
    optimizer = make(model.parameters())
    local = LocalSGD(optimizer, **options)
    for step in steps:
        _gradients(model, step, rank)
        optimizer.step()
    return model, optimizer, local


def _sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def _adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.02)


def _every_way(rank):
    averaged = {"outer_learning_rate": 1.0, "outer_momentum": 0.0}
    one, *_ = _local(rank, _sgd, range(STEPS), every=1, **averaged)
    diloco, *_ = _local(rank, _adamw, range(STEPS), every=4)
    # cut inside a round, saved by rank, loaded into new objects
    model, optimizer, local = _local(rank, _adamw, range(6), every=4)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), local.state_dict()))
    again = _model()
    inner = _adamw(again.parameters())
    outer = LocalSGD(inner, every=4)
    for part, state in zip((again, inner, outer), saved, strict=True):
        part.load_state_dict(state)
    for step in range(6, STEPS):
        _gradients(again, step, rank)
        inner.step()
    return _flat(one), _flat(diloco), _flat(again)


def _averaged_gradients(size):
    """Return the weights of SGD on the mean gradient of all ranks' rows."""
    model = _model()
    optimizer = _sgd(model.parameters())
    for step in range(STEPS):
        parts = [_rows(step, rank) for rank in range(size)]
        inputs, targets = (torch.cat(column) for column in zip(*parts, strict=True))
        model.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return _flat(model)


def _diloco(size, rate=0.7, momentum=0.9):
    """Return the weights of DiLoCo, all ranks in one process, Nesterov written out."""
    models = [_model() for _ in range(size)]
    optimizers = [_adamw(model.parameters()) for model in models]
    met, velocity = _flat(models[0]), torch.zeros(())
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            _gradients(model, step, rank)
            optimizer.step()
        if (step + 1) % 4 == 0:
            way = torch.stack([met - _flat(model) for model in models]).mean(0)
            velocity = momentum * velocity + way
            met = met - rate * (way + momentum * velocity)
            for model in models:
                torch.nn.utils.vector_to_parameters(met.clone(), model.parameters())
    return met


@pytest.mark.parametrize("world_size", [2, 3])
def test_local_steps_equal_the_formulas_in_one_process_and_resume_bit_equal(world_size):
    averaged, expected = _averaged_gradients(world_size), _diloco(world_size)
    found = run_ranks(_every_way, world_size)
    for one, diloco, resumed in found:
        # float64: only the order of additions differs
        assert torch.allclose(one, averaged, rtol=0, atol=1e-12)
        assert torch.allclose(diloco, expected, rtol=0, atol=1e-12)
        assert torch.equal(resumed, diloco)
        assert torch.equal(diloco, found[0][1])


def _trained(rank, **options):
    torch.manual_seed(0)
    mesh = build_mesh()
    config = DecoderConfig(vocab_size=280, num_layers=2, hidden_size=32, context_length=12)
    communication = CommunicationConfig(**options)
    model = parallelize(DecoderLM(config), mesh, strategy="ddp", communication=communication)
    data = TextData(shakespeare()[:8000], vocab_size=280, context_length=12)
    trainer = Trainer(model, data, TrainConfig(num_steps=STEPS, global_batch_size=6))
    with WireCounter() as wire:
        losses = trainer.fit().losses
    weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    others = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(others, weights)
    return losses, all(torch.equal(weights, other) for other in others), wire.total


def _plain_and_local(rank):
    texts = []
    for change in ({"num_steps": 7}, {"autocast_dtype": "float16"}, {"on_failure": "heal"}):
        model = parallelize(
            DecoderLM(DecoderConfig.tiny(280)),
            build_mesh(),
            strategy="ddp",
            communication=CommunicationConfig(local_steps=4),
        )
        data = TextData(shakespeare()[:8000], vocab_size=280, context_length=12)
        try:
            Trainer(model, data, TrainConfig(**{"num_steps": 8} | change))
        except ValueError as error:
            texts.append(str(error))
    return _trained(rank), _trained(rank, local_steps=4), texts


def test_trainer_with_local_steps_ends_with_equal_ranks_and_a_quarter_of_the_bytes():
    for (plain, _, dense), (losses, equal, sent), texts in run_ranks(_plain_and_local, 2):
        assert equal
        assert losses[0] == plain[0]
        # both fall by about 0.2; one outer rate of 0.7 lags behind
        assert losses[-1] < plain[0] - 0.1
        assert sent == pytest.approx(dense / 4, rel=0.01)  # the shared loss is the rest
        assert [text.split(" was asked")[0] for text in texts] == ["local_steps=4"] * 3
        assert "set num_steps to a multiple of 4" in texts[0]
        assert 'set "bfloat16"' in texts[1]
        assert "save each rank's state_dict" in texts[2]
