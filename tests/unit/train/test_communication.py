"""Options of communication, and the bytes of collectives."""

import re

import pytest
import torch

from nbdist.train.communication import CommunicationConfig, LocalSGD, bytes_sent


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"compression": "int8"}, "compression='int8' is unknown; set"),
        ({"compression": "onebit", "warmup_steps": 1}, "warmup_steps=1 was asked for"),
        ({"prefetch": 0}, "prefetch=0 is below 1; set prefetch >= 1"),
        ({"bucket_megabytes": 0}, "bucket_megabytes=0 is not above 0"),
        ({"local_steps": 0}, "local_steps=0 is below 1; set local_steps >= 1"),
        ({"local_steps": 4, "compression": "fp16"}, "no gradients travel; leave these two out"),
        ({"compression": "powersgd", "bucket_megabytes": 1}, "hang with several buckets"),
    ],
)
def test_options_out_of_range_name_what_to_set(options, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        CommunicationConfig(**options)


@pytest.mark.parametrize(
    ("options", "strategy", "text"),
    [
        (
            {"compression": "fp16"},
            "zero3",
            "it is for DDP only; leave it out, or set strategy='ddp'",
        ),
        ({"bucket_megabytes": 2}, "zero1", "it is for DDP only"),
        ({"prefetch": 1}, "ddp", "it is for FSDP only; leave it out, or set strategy='zero3'"),
    ],
)
def test_options_of_another_strategy_are_refused(options, strategy, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        CommunicationConfig(**options).check_strategy(strategy)


def test_bytes_of_a_ring_follow_the_number_of_ranks():
    assert bytes_sent("all_reduce", 1200, 4) == 1800
    assert bytes_sent("all_gather_single", 1200, 4) == 900
    assert bytes_sent("all_reduce", 1200, 1) == 0
    with pytest.raises(ValueError, match="bytes of 'gossip' were asked for; known are all_reduce"):
        bytes_sent("gossip", 1, 2)


def test_local_steps_out_of_range_are_refused():
    optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
    with pytest.raises(ValueError, match="outer_momentum=1; set every >= 1"):
        LocalSGD(optimizer, every=4, outer_momentum=1)
