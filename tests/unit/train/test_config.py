"""TrainConfig: schedule, checks, description."""

import itertools
import json

import pytest
import torch

from nbdist.train import CheckpointConfig, TrainConfig, next_token_loss


def test_learning_rate_warms_up_and_falls_along_a_cosine():
    config = TrainConfig(num_steps=110, learning_rate=1.0, warmup_steps=9)
    rates = [config.learning_rate_at(step) for step in range(110)]

    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == 1.0
    assert rates[9 + 101 // 2] == pytest.approx(0.55, abs=0.01)
    assert all(a > b for a, b in itertools.pairwise(rates[9:]))
    assert config.learning_rate_at(110) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_steps": 0}, "set num_steps > 0"),
        ({"num_steps": 5, "clip_norm": 0.0}, "set clip_norm > 0"),
        ({"num_steps": 5, "weight_decay": -1.0}, "set weight_decay >= 0"),
        ({"num_steps": 5, "eval_every": 0}, "set eval_every=None"),
        ({"num_steps": 5, "accumulation_steps": 0}, "set accumulation_steps > 0"),
        ({"num_steps": 5, "autocast_dtype": "float8"}, "none of bfloat16, float16"),
    ],
)
def test_config_refuses_values_out_of_range(change, text):
    with pytest.raises(ValueError, match=text):
        TrainConfig(**change)


def test_checkpoint_config_refuses_zero_steps():
    with pytest.raises(ValueError, match="every_steps=0"):
        CheckpointConfig(directory="x", every_steps=0)


def test_description_is_json(tmp_path):
    config = TrainConfig(
        num_steps=5, checkpoint=CheckpointConfig(directory=tmp_path, every_steps=2), on_step=print
    )

    described = json.loads(json.dumps(config.describe()))

    assert (described["loss_fn"], described["on_step"]) == ("next_token_loss", "print")
    assert TrainConfig(num_steps=5).describe()["on_step"] is None
    assert described["checkpoint"]["directory"] == str(tmp_path)


def test_next_token_loss_of_bfloat16_is_computed_in_float32():
    logits = torch.randn(2, 3, 11, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.zeros(2, 3, dtype=torch.long)

    loss = next_token_loss(logits, targets)

    assert loss.dtype == torch.float32
    assert loss == next_token_loss(logits.float(), targets)
