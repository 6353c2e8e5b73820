"""Phases from marks, the slow rank from phases, the share of a device's peak."""

import re
from dataclasses import replace

import pytest
import torch

from nbdist.testing import ManualClock
from nbdist.train import DecoderConfig, DecoderLM, TrainConfig
from nbdist.train.mfu import flops_per_token, peak_flops
from nbdist.train.phases import Phase, PhaseClock
from nbdist.train.stragglers import find_straggler, typical


def test_marks_give_each_phase_its_time_and_leave_out_what_belongs_to_none():
    now = ManualClock()
    clock = PhaseClock("cpu", now=now)

    first = clock.begin()
    for phase, seconds in ((Phase.DATA, 1), (Phase.FORWARD, 2), (None, 32), (Phase.FORWARD, 4)):
        now.advance(seconds)
        clock.mark(phase)
    now.advance(64)  # after the last mark: between steps
    found = dict(zip(Phase, clock.begin(), strict=True))

    assert first is None
    assert found == dict.fromkeys(Phase, 0.0) | {Phase.DATA: 1.0, Phase.FORWARD: 6.0}


def test_time_in_collectives_is_taken_out_of_the_phase():
    now, waited = ManualClock(), ManualClock()
    clock = PhaseClock("cpu", waited, now)

    clock.begin()
    now.advance(5)
    waited.advance(3)
    clock.mark(Phase.BACKWARD)
    found = dict(zip(Phase, clock.begin(), strict=True))

    assert (found[Phase.BACKWARD], found[Phase.COMMUNICATION]) == (2, 3)


class FakeEvent:
    """An event of a GPU, in milliseconds of a clock that moves by 250 ms a record."""

    now = 0.0

    def __init__(self, *, enable_timing):
        assert enable_timing, "else it has no time"
        self.is_done = False

    def record(self):
        FakeEvent.now += 250.0
        self.at = FakeEvent.now

    def synchronize(self):
        self.is_done = True

    def elapsed_time(self, later):
        return later.at - self.at


def test_a_gpu_is_measured_by_its_events_and_not_by_the_waits_of_the_host(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    waited = ManualClock()
    clock = PhaseClock("cuda", waited)

    clock.begin()
    waited.advance(3)
    clock.mark(Phase.FORWARD)
    clock.mark(Phase.BACKWARD)
    last = clock._marks[-1][1]
    found = dict(zip(Phase, clock.begin(), strict=True))

    assert found == dict.fromkeys(Phase, 0.0) | {Phase.FORWARD: 0.25, Phase.BACKWARD: 0.25}
    assert last.is_done


def _row(*, forward=2.0, backward=4.0, wait=0.0, save=0.0):
    return [1.0, forward, backward, wait, 1.0, save]


def test_one_odd_step_names_nobody():
    even = [_row(), _row(wait=0.5), _row()]
    odd = [_row(), _row(forward=50.0), _row()]

    assert find_straggler(typical([even, odd, even]), 1.3) is None


def test_rank_that_works_longer_is_named_with_its_phase_though_all_steps_last_as_long():
    rows = [_row(wait=6.0), _row(wait=6.0), _row(backward=10.0)]

    found = find_straggler(typical([rows] * 3), 1.3)

    assert (found.rank, found.phase) == (2, Phase.BACKWARD)
    assert (found.own_seconds, found.usual_seconds) == (14.0, 8.0)
    assert str(found) == (
        "rank 2 is slow: 14,000.0 ms of work a step, the other ranks need 8,000.0 ms and wait for "
        "it; it loses most in backward: 10,000.0 ms instead of 4,000.0 ms"
    )
    assert find_straggler(typical([rows] * 3), 2.0) is None
    assert find_straggler([_row()], 1.3) is None


def test_a_phase_of_few_steps_counts_by_their_share():
    saves = [[_row(), _row(save=40.0 if step == 9 else 0.0)] for step in range(10)]

    usual = typical(saves)

    assert usual[1] == _row(save=4.0)
    assert find_straggler(usual, 1.3).phase == Phase.SAVE


def test_flops_of_a_token_are_those_of_palm():
    config = DecoderConfig.tiny()
    model = DecoderLM(config)
    dense = 6 * model.num_parameters
    attention = 12 * 4 * 4 * 32 * 128  # layers, heads, head size, tokens

    assert flops_per_token(model, 128) == dense + attention
    assert flops_per_token(torch.nn.Linear(3, 5, bias=False), 128) == 6 * 15


def test_only_the_experts_of_a_token_count():
    few = DecoderLM(replace(DecoderConfig.tiny(), num_experts=4, experts_per_token=1))
    of_experts = sum(p.numel() for name, p in few.named_parameters() if ".experts." in name)
    rest = few.num_parameters - of_experts

    assert flops_per_token(few, 0) == 6 * (rest + of_experts / 4)


def test_peak_of_a_gpu_is_looked_up_and_that_of_a_cpu_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    gpu = torch.device("cuda", 0)

    assert peak_flops(gpu, torch.bfloat16) == 989e12
    assert peak_flops(gpu, torch.float32) == 67e12
    assert peak_flops(gpu, torch.float64) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    assert peak_flops(gpu, torch.bfloat16) is None
    assert peak_flops(torch.device("cpu"), torch.float32) > 1e8


@pytest.mark.parametrize(
    ("name", "capability", "half", "single"),
    [
        ("NVIDIA H100 PCIe", (9, 0), 756e12, 51e12),
        ("NVIDIA H200 NVL", (9, 0), 835e12, 60e12),
        ("NVIDIA A100-SXM4-80GB", (8, 0), 312e12, 19.5e12),
        ("NVIDIA L40", (8, 9), 181e12, 90.5e12),  # holds "L4"
        ("NVIDIA RTX A4000", (8, 6), None, None),  # holds "A40"
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", (8, 0), None, None),
        ("Tesla V100-PCIE-16GB", (7, 0), 112e12, 14e12),
    ],
)
def test_gpu_is_known_by_whole_words(monkeypatch, name, capability, half, single):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    gpu = torch.device("cuda", 0)

    assert (peak_flops(gpu, torch.float16), peak_flops(gpu, torch.float32)) == (half, single)
    # tensor cores take bfloat16 from Ampere on
    assert peak_flops(gpu, torch.bfloat16) == (half if capability >= (8, 0) else None)


def test_ratio_of_one_is_refused():
    with pytest.raises(ValueError, match=re.escape("set straggler_ratio > 1")):
        TrainConfig(num_steps=1, straggler_ratio=1.0)
