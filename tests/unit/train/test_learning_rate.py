"""The rules that link learning rate and global batch."""

import re

import pytest

from nbdist.train import scale_learning_rate


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
