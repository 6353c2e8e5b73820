"""The rules that link learning rate and global batch."""

import re

import pytest

from nbdist.train import TrainConfig, scale_learning_rate
from nbdist.train.learning_rate import batch_line


def test_rules_follow_the_batch_and_its_root():
    assert scale_learning_rate(0.1, base_batch=16, batch=64, rule="linear") == pytest.approx(0.4)
    assert scale_learning_rate(0.1, base_batch=16, batch=64) == pytest.approx(0.2)
    assert scale_learning_rate(0.1, base_batch=64, batch=16, rule="sqrt") == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"batch": 0}, "batch=0 is not above 0; set batch > 0"),
        ({"rule": "cubic"}, "rule='cubic' is unknown; set"),
    ],
)
def test_scaling_by_what_is_no_rule_or_batch_is_refused(change, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        scale_learning_rate(**({"base": 0.1, "base_batch": 16, "batch": 64} | change))


@pytest.mark.parametrize(
    ("options", "ranks", "line"),
    [
        (
            {"global_batch_size": 64, "accumulation_steps": 4},
            2,
            "global batch 64 = 2 ranks x 8 rows x 4 micro-batches, learning rate 0.003",
        ),
        (
            {
                "global_batch_size": 64,
                "learning_rate": scale_learning_rate(3e-3, base_batch=16, batch=64),
            },
            3,
            (
                "global batch 64 = 3 ranks x 21 to 22 rows, learning rate 0.006 "
                "(sqrt rule from 0.003 at batch 16)"
            ),
        ),
    ],
)
def test_batch_and_rate_are_told_on_one_line(options, ranks, line):
    assert batch_line(TrainConfig(num_steps=1, **options), ranks) == line
