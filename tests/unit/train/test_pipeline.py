"""Pipeline schedules as pictures, and where models are cut."""

import itertools

import pytest
import torch
from torch import nn

from nbdist.train import DecoderConfig, DecoderLM, PipelineConfig, schedule_grid
from nbdist.train.parallelize.cutting import Passed, balance, keep_units, stage_module, units_of


@pytest.mark.parametrize(
    ("schedule", "bubble"),
    [
        # GPipe: arXiv 1811.06965; interleaved over v stages: arXiv 2104.04473, section 2.2
        ("gpipe", 3 / (8 + 3)),
        ("1f1b", 3 / (8 + 3)),
        ("interleaved", 3 / (2 * 8 + 3)),
    ],
)
def test_bubble_fraction_is_that_of_the_papers(schedule, bubble):
    assert schedule_grid(schedule, 4, 8).bubble_fraction == pytest.approx(bubble)


@pytest.mark.parametrize("schedule", ["zero_bubble", "zbv"])
def test_split_backward_fills_most_of_the_bubble(schedule):
    grid = schedule_grid(schedule, 4, 8)

    assert grid.bubble_fraction < 0.5 * schedule_grid("1f1b", 4, 8).bubble_fraction
    assert {slot.kind for slot in grid.slots} == {"F", "I", "W"}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"])
def test_every_micro_batch_passes_every_stage_once_and_no_rank_does_two_things(schedule):
    grid = schedule_grid(schedule, 2, 4)

    num_stages = 2 if schedule in ("gpipe", "1f1b") else 4
    forwards = [(slot.stage, slot.micro_batch) for slot in grid.slots if slot.kind == "F"]
    assert sorted(forwards) == [(stage, batch) for stage in range(num_stages) for batch in range(4)]
    for rank in range(2):
        spans = sorted((slot.start, slot.stop) for slot in grid.slots if slot.rank == rank)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def test_picture_has_a_line_a_rank_and_names_the_bubble():
    lines = str(schedule_grid("gpipe", 2, 2)).splitlines()

    assert lines == [
        "gpipe: 33% of the time is bubble",
        "pp 0 |F0|F1|..|..|..|B0|--|B1|--|",
        "pp 1 |..|F0|F1|B0|--|B1|--|..|..|",
    ]


def test_plot_has_a_bar_a_computation():
    pytest.importorskip("matplotlib")
    grid = schedule_grid("1f1b", 2, 2)

    axes = grid.plot().axes[0]

    assert len(axes.patches) == len(grid.slots) == 8


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lambda: schedule_grid("2f2b", 2, 2), "set one of 'gpipe'"),
        (lambda: schedule_grid("1f1b", 0, 2), "set both >= 1"),
        (lambda: PipelineConfig(schedule="gpipe", stages_per_rank=2), "stages_per_rank = 1"),
        (lambda: PipelineConfig(num_micro_batches=0), "num_micro_batches >= 1"),
    ],
)
def test_what_is_no_schedule_is_refused(ask, text):
    with pytest.raises(ValueError, match=text):
        ask()


def test_cuts_make_the_dearest_stage_as_cheap_as_can_be():
    assert balance([1, 1, 1, 1, 4], 2) == [0, 4]
    assert balance([3, 1, 1, 3], 2) == [0, 2]
    assert balance([1, 1, 1], 3) == [0, 1, 2]
    with pytest.raises(ValueError, match="the model has 2 units"):
        balance([1, 1], 3)


def _decoder(**change):
    base = {"vocab_size": 32, "num_layers": 3, "hidden_size": 16, "tie_embeddings": False}
    return DecoderLM(DecoderConfig(**base | change)).double()


def test_units_are_what_runs_one_after_another():
    layers = ["layers.0", "layers.1", "layers.2"]
    assert units_of(_decoder()) == ["embedding", *layers, "norm", "head"]
    assert units_of(nn.Sequential(nn.Linear(2, 2), nn.Tanh())) == ["0", "1"]


def test_units_of_a_hugging_face_model():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2,
    )  # fmt: skip

    assert units_of(transformers.LlamaForCausalLM(config)) == [
        "model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head",
    ]  # fmt: skip


def test_stages_one_after_another_are_the_model():
    model = _decoder()
    tokens = torch.arange(8)[None]
    wanted = model(tokens)
    units = units_of(model)

    first = stage_module(model, units, units[:3])
    second = stage_module(model, units, units[3:])

    assert torch.equal(second(first(tokens)), wanted)
    keep_units(model, units, set(units[:3]))
    assert isinstance(model.head, Passed)
    assert all(name.startswith(("embedding", "layers.0", "layers.1")) for name, _ in
               model.named_parameters())  # fmt: skip
    assert torch.equal(second(first(tokens)), wanted)


class _Loose(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])


def test_models_that_cannot_be_cut_say_why():
    with pytest.raises(ValueError, match=r"tie_embeddings=False"):
        units_of(_decoder(tie_embeddings=True))
    with pytest.raises(ValueError, match="`scale` lies outside the units"):
        units_of(_Loose())
    with pytest.raises(ValueError, match=r"no nn.ModuleList or"):
        units_of(nn.Linear(2, 2))
    shared = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"`1.weight` is also a weight of `0`"):
        units_of(nn.Sequential(shared, shared))
