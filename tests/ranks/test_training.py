"""Sharded training equals one plain process, in float64, and ranks stop together."""

import contextlib
import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from nbdist.errors import CheckpointError, NoWorldError
from nbdist.testing import run_ranks
from nbdist.train import (
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

NUM_STEPS = 4
# float64: sums in another order differ by 1e-16 a term; Adam's square root raises it somewhat
TOLERANCE = 1e-11


def _data():
    return TextData(shakespeare()[:20_000], vocab_size=280, context_length=16, seed=2)


def _model(seed=0):
    config = DecoderConfig(
        vocab_size=280,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        hidden_size=24,  # 3 ranks hold uneven shards of a width of 64 and of 280 rows
        context_length=16,
    )
    return DecoderLM(config, seed=seed).double()


def _config(global_batch_size, **change):
    return TrainConfig(
        num_steps=NUM_STEPS,
        global_batch_size=global_batch_size,
        warmup_steps=2,
        clip_norm=0.5,
        **change,
    )


def _reference(global_batch_size):
    """Losses, norms and clipped gradients of a plain loop that uses nothing of the trainer."""
    data, model, config = _data(), _model(), _config(global_batch_size)
    rows = data.for_rank(global_batch_size=global_batch_size, rank=0, world_size=1)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
    )
    losses, norms, gradients = [], [], []
    for step in range(NUM_STEPS):
        inputs, targets = rows.batch(step)
        loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate_at(step)
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms, gradients


def _train(rank, mesh_config, global_batch_size):
    trainer = Trainer(
        # other ranks start elsewhere: rank 0's weights have to win
        _model(seed=rank),
        _data(),
        _config(global_batch_size),
        mesh=build_mesh(mesh_config),
    )
    gradients = []

    def keep_gradients(*_):
        named = trainer.model.named_parameters()
        gradients.append({name: p.grad.full_tensor() for name, p in named})

    trainer.optimizer.register_step_pre_hook(keep_gradients)
    history = trainer.fit()
    local = sum(p.to_local().numel() for p in trainer.model.parameters())
    return history.losses, [r.grad_norm for r in history.records], gradients, local


@pytest.mark.parametrize(
    ("world_size", "mesh_config", "global_batch_size"),
    [
        (1, MeshConfig(), 6),
        (2, MeshConfig(), 6),
        (3, MeshConfig(), 6),
        (3, MeshConfig(), 8),  # 2, 3 and 3 rows
        (2, MeshConfig(dp_replicate=2), 6),
        (4, MeshConfig(dp_replicate=2, dp_shard=2), 8),
    ],
    ids=["1", "2", "3", "3-uneven-rows", "2-replicas", "4-hsdp"],
)
def test_sharded_training_equals_one_process(world_size, mesh_config, global_batch_size):
    losses, norms, gradients = _reference(global_batch_size)

    results = run_ranks(_train, world_size, mesh_config, global_batch_size)

    for found_losses, found_norms, found_gradients, _ in results:
        assert found_losses == pytest.approx(losses, abs=TOLERANCE)
        assert found_norms == pytest.approx(norms, abs=TOLERANCE)
        for step in range(NUM_STEPS):
            torch.testing.assert_close(
                found_gradients[step], gradients[step], atol=TOLERANCE, rtol=0
            )
    num_shards = mesh_config.degrees(world_size)["dp_shard"]
    whole = _model().num_parameters
    assert sum(result[3] for result in results) == whole * (world_size // num_shards)


def _interrupted(rank):
    data = _data()
    plain = Trainer(_model(), data, _config(6)).fit().losses
    trainer = Trainer(_model(), data, _config(6))
    batch = trainer.data.batch

    class Interrupting:
        num_validation_batches = 0

        def batch(self, step):
            if step == 1 and rank == 1:  # only one rank gets the signal
                os.kill(os.getpid(), signal.SIGINT)
            return batch(step)

    trainer.data = Interrupting()
    stopped_at, told = None, ""
    try:
        trainer.fit()
    except KeyboardInterrupt as interrupt:
        stopped_at, told = trainer.step, str(interrupt)
    return stopped_at, told, plain, trainer.fit().losses, trainer.fit().losses


@pytest.mark.parametrize("world_size", [2, 3])
def test_interrupt_on_one_rank_stops_all_after_the_same_step(world_size):
    for stopped_at, told, plain, continued, again in run_ranks(_interrupted, world_size):
        assert stopped_at == 2
        assert told.startswith("stopped after step 2; fit() goes on; no checkpoint was written")
        assert continued == plain  # bit for bit: nothing lost, nothing trained twice
        assert again == plain  # a finished run does not train on


def _cut_and_fit_again(rank):
    trainer = Trainer(_model(), _data(), _config(6))
    update = trainer.optimizer.step

    def cut():
        if rank == 1:
            trainer.optimizer.step = update
            raise KeyboardInterrupt
        update()

    trainer.optimizer.step = cut
    trainer.config = TrainConfig(num_steps=1, global_batch_size=6)
    with contextlib.suppress(KeyboardInterrupt):
        trainer.fit()
    try:
        trainer.fit()
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_fit_after_a_torn_update_names_the_steps_of_the_ranks():
    for text in run_ranks(_cut_and_fit_again, 2):
        assert text.startswith("CheckpointError: the last fit() was cut inside an update")
        assert "{0: 1, 1: 0}" in text


def _group_made_anew(rank, directory):
    trainer = Trainer(_model(), _data(), _config(6))
    dist.destroy_process_group()
    store = dist.FileStore(f"{directory}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    trainer.fit()


def test_fit_after_the_group_was_made_anew_says_what_to_build(tmp_path):
    with pytest.raises(NoWorldError, match=r"build the model and the Trainer again.*resume="):
        run_ranks(_group_made_anew, 2, tmp_path)


class _AnyModule(torch.nn.Module):
    """No `layers`, a buffer, and weights outside the blocks that every block uses."""

    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Linear(8, 8)
        self.stages = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Tanh()])
        self.register_buffer("scale", torch.full((8,), float(torch.rand(()))))

    def forward(self, x):
        for stage in self.stages:
            x = stage(self.stem(x)) * self.scale
        return x


def _any_module(rank):
    torch.manual_seed(rank)
    module = _AnyModule()
    first = parallelize(module, build_mesh())
    second = parallelize(module, build_mesh())
    weight = first.stem.weight.full_tensor()
    first(torch.ones(2, 8)).sum().backward()
    return first is module, second is module, weight, first.scale


def test_parallelize_takes_any_module_once_and_copies_rank_zero():
    results = run_ranks(_any_module, 3)

    for is_same, is_same_again, weight, scale in results:
        assert is_same
        assert is_same_again
        assert torch.equal(weight, results[0][2])
        assert torch.equal(scale, results[0][3])


def _half_precision(rank):
    config = _model().config
    model = parallelize(DecoderLM(config), build_mesh(), param_dtype=torch.bfloat16)
    logits = model(torch.zeros(1, 4, dtype=torch.long))
    logits.float().sum().backward()
    kept = next(model.parameters())
    return str(logits.dtype), str(kept.dtype), str(kept.grad.dtype)


def test_param_dtype_computes_in_it_and_keeps_weights_in_float32():
    dtypes = ("torch.bfloat16", "torch.float32", "torch.float32")
    assert run_ranks(_half_precision, 2) == [dtypes, dtypes]


def _different_models(rank):
    parallelize(torch.nn.Linear(4, 4 + rank), build_mesh())


def test_parallelize_names_the_first_tensor_that_differs():
    with pytest.raises(ValueError, match=r"different models: .* \('weight', \(5, 4\)"):
        run_ranks(_different_models, 2)


def _meta_model(rank):
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    parallelize(model, build_mesh(), strategy="ddp")


def test_parallelize_refuses_a_model_without_memory():
    with pytest.raises(ValueError, match="need whole weights here; build it with memory"):
        run_ranks(_meta_model, 2)


def _wrong_mesh(rank):
    build_mesh(MeshConfig(dp_replicate=2, dp_shard=2))


def test_mesh_that_does_not_cover_the_world_is_refused_on_all_ranks():
    with pytest.raises(ValueError, match="= 4, but world_size=3; start 4 ranks"):
        run_ranks(_wrong_mesh, 3)


def _evaluate(rank):
    trainer = Trainer(_model(), _data(), _config(6, eval_every=2))
    before = trainer.evaluate()
    history = trainer.fit()
    return before, [r.validation_loss for r in history.records], trainer.model.training


@pytest.mark.parametrize("world_size", [2, 3])
def test_validation_loss_is_the_mean_over_the_split(world_size):
    data, model = _data(), _model()
    rows = data.for_rank(global_batch_size=6, rank=0, world_size=1)
    batches = [rows.validation_batch(index) for index in range(rows.num_validation_batches)]
    inputs, targets = (torch.cat(part) for part in zip(*batches, strict=True))
    expected = float(cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).detach())

    for before, validation, training in run_ranks(_evaluate, world_size):
        assert before == pytest.approx(expected, abs=TOLERANCE)
        assert validation[0] is validation[2] is None
        assert validation[3] < validation[1] < before
        assert training


def _no_validation(rank):
    data = TextData(shakespeare()[:5000], vocab_size=280, context_length=16, validation_fraction=0)
    Trainer(_model(), data, _config(6)).evaluate()


def test_evaluate_without_a_validation_split_says_how_to_get_one():
    with pytest.raises(ValueError, match="validation_fraction > 0"):
        run_ranks(_no_validation, 2)
