"""Lower precision, loss scaling, determinism and anomalies of a run."""

import json

import pytest
import torch

from nbdist.errors import NonFiniteError
from nbdist.testing import run_ranks
from nbdist.train import (
    CheckpointConfig,
    DecoderConfig,
    DecoderLM,
    TextData,
    TrainConfig,
    Trainer,
    latest,
    shakespeare,
)
from nbdist.train.precision import LossScale, deterministic


def test_loss_scale_halves_on_infinity_and_doubles_after_good_steps():
    scale = LossScale(enabled=True, growth_steps=2)
    norm, infinite = torch.tensor(1.0), torch.tensor(float("inf"))

    assert [scale.accept(norm), scale.accept(infinite), scale.value] == [True, False, 2.0**15]
    assert [scale.accept(norm), scale.accept(norm), scale.value] == [True, True, 2.0**16]
    off = LossScale(enabled=False)
    assert [off.accept(infinite), off.value] == [True, 1.0]


def test_loss_scale_goes_on_from_its_state():
    scale, resumed = (LossScale(enabled=True, growth_steps=3) for _ in range(2))
    for norm in (torch.tensor(float("inf")), torch.tensor(1.0), torch.tensor(1.0)):
        scale.accept(norm)
    assert scale.state == (2.0**15, 2)

    resumed.restore(json.loads(json.dumps(scale.state)))
    resumed.accept(torch.tensor(1.0))  # the third good step doubles it

    assert resumed.state == (2.0**16, 3)
    resumed.restore(None)  # a checkpoint of a run in another dtype
    assert resumed.state == (2.0**16, 0)
    assert LossScale(enabled=False).state is None


def test_deterministic_mode_ends_with_its_context():
    with deterministic(enabled=True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def _trainer(**change):
    config = DecoderConfig(vocab_size=280, num_layers=2, hidden_size=16, context_length=12)
    return Trainer(
        DecoderLM(config),
        TextData(shakespeare()[:8000], vocab_size=280, context_length=12),
        TrainConfig(num_steps=6, global_batch_size=4, **change),
    )


class _Poison:
    """Lets one layer of one rank return NaN in the third forward."""

    def __init__(self):
        self.calls = 0

    def __call__(self, module, args, output):
        self.calls += 1
        return output * float("nan") if self.calls == 3 else output


def _runs(rank):
    losses = {}
    for dtype in (None, "bfloat16", "float16"):
        trainer = _trainer(autocast_dtype=dtype, deterministic=True, accumulation_steps=2)
        losses[dtype] = trainer.fit().losses
    scale = trainer._forward_backward.scale
    scale.value = 2.0**140  # infinite in float32: the step is left out on all ranks
    weights = [p.full_tensor().clone() for p in trainer.model.parameters()]
    trainer.config = TrainConfig(num_steps=7, global_batch_size=4, autocast_dtype="float16")
    trainer.fit()
    kept = all(
        torch.equal(a, b.full_tensor())
        for a, b in zip(weights, trainer.model.parameters(), strict=True)
    )
    return losses, kept, trainer.step, scale.value


def test_lower_precision_follows_float32_and_a_step_with_infinity_is_left_out():
    for losses, kept, step, scale in run_ranks(_runs, 2):
        # 8 and 11 bits of a product's factors, over 6 steps of losses near 5.6
        assert losses["bfloat16"] == pytest.approx(losses[None], abs=3e-2)
        assert losses["float16"] == pytest.approx(losses[None], abs=1e-2)
        assert losses["float16"] != losses["bfloat16"] != losses[None]
        assert kept
        assert (step, scale) == (7, 2.0**139)


def _poisoned(rank):
    trainer = _trainer(detect_anomaly=True)
    if rank == 1:
        trainer.model.layers[1].ffn.up.register_forward_hook(_Poison())
    try:
        trainer.fit()
    except NonFiniteError as error:
        weights = all(bool(p.full_tensor().isfinite().all()) for p in trainer.model.parameters())
        return str(error), trainer.step, weights
    return "", trainer.step, False


def test_anomaly_names_layer_and_rank_on_all_ranks_and_spares_the_weights():
    for text, step, weights_are_finite in run_ranks(_poisoned, 2):
        assert "step 3 met values that are not finite" in text
        assert "rank 1: the output of `layers.1.ffn.up` has NaN" in text
        assert "rank 0" not in text
        assert step == 2
        assert weights_are_finite


def _saved_and_loaded(rank, directory):
    where = CheckpointConfig(directory=directory, every_steps=2)
    trainer, loaded = (_trainer(autocast_dtype="float16", checkpoint=where) for _ in range(2))
    trainer.loss_scale.value = 2.0**9
    trainer.fit()
    loaded.load(latest(directory))
    states = [
        [
            value.full_tensor() if hasattr(value, "full_tensor") else value
            for p in one.model.parameters()
            for value in (p, *one.optimizer.state[p].values())
        ]
        for one in (trainer, loaded)
    ]
    equal = [torch.equal(a, b) for a, b in zip(*states, strict=True)]
    return equal, trainer.loss_scale.state, loaded.loss_scale.state


def test_third_background_save_holds_the_last_state_and_the_loss_scale(tmp_path):
    # the saves share one copy in memory: a stale one would hold the weights of step 2
    for equal, state, loaded in run_ranks(_saved_and_loaded, 2, tmp_path):
        assert len(equal) > 30
        assert all(equal)
        assert state == loaded == (2.0**9, 6)
