"""Memory plans and the choice of a mesh."""

import pytest
import torch

from nbdist.errors import NoWorldError
from nbdist.train import DecoderConfig, DecoderLM, MeshConfig
from nbdist.train.activations import count_kept
from nbdist.train.plan import choose_mesh, plan_memory

SAMPLE = torch.zeros(2, 16, dtype=torch.long)


def _decoder(**change):
    return DecoderLM(
        DecoderConfig(**{"vocab_size": 64, "hidden_size": 32, "num_layers": 6} | change)
    )


def _kept(model, sample):
    """Bytes that a real forward keeps for backward, beside the weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(sample)
    assert output.requires_grad
    return sum(size for size, _ in kept.values())


def test_counted_activations_are_those_of_a_real_forward():
    model = _decoder()

    assert count_kept(model, SAMPLE).activations == _kept(model, SAMPLE)
    assert count_kept(model, SAMPLE).output == 2 * 16 * 64 * 4
    long = torch.zeros(1, 128, dtype=torch.long)  # attention's whole matrix would be most of it
    assert count_kept(model, long).activations == _kept(model, long)
    linear = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    rows = torch.ones(5, 8)
    assert count_kept(linear, rows) == (_kept(linear, rows), 5 * 4 * 4)
    assert _kept(linear, rows) == 5 * (8 + 16) * 4


def test_recomputed_blocks_keep_their_inputs_and_one_inside():
    model = _decoder(num_layers=8)

    whole = count_kept(model, SAMPLE).activations
    again = count_kept(model, SAMPLE, checkpoint_activations=True).activations

    assert again < whole / 2
    assert again > 8 * 2 * 16 * 32 * 4


def test_plan_follows_the_sums_of_zero():
    model = _decoder()
    size = model.num_parameters * 4
    four = MeshConfig(dp_shard=4)

    ddp = plan_memory(model, four, 4, strategy="ddp")
    zero1 = plan_memory(model, four, 4, strategy="zero1", accumulation_steps=2)
    zero3 = plan_memory(model, four, 4)

    assert (ddp.weight_bytes, ddp.gradient_bytes, ddp.optimizer_bytes) == (size, size, 2 * size)
    assert (zero1.gradient_bytes, zero1.optimizer_bytes) == (size, size // 4 * 2)
    assert zero3.gradient_bytes == size // 4
    # two blocks of six, and the embedding
    assert size // 4 + size // 3 < zero3.weight_bytes < size // 4 + size // 2
    assert plan_memory(model, four, 4, accumulation_steps=2).gradient_bytes == size
    cut = plan_memory(model, MeshConfig(dp_shard=2, tp=2), 4, sample=SAMPLE)
    kept = count_kept(model, SAMPLE)
    # norms and what goes between layers stays whole
    assert kept.activations / 2 < cut.activation_bytes < kept.activations * 0.8
    assert cut.output_bytes == kept.output
    assert "MiB a rank" in str(cut)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (4.8, {"dp_replicate": 4, "dp_shard": 1, "tp": 1}),
        (2.9, {"dp_replicate": 2, "dp_shard": 2, "tp": 1}),
        (1.8, {"dp_replicate": 1, "dp_shard": 4, "tp": 1}),
        (1.4, {"dp_replicate": 1, "dp_shard": 2, "tp": 2}),
    ],
)
def test_first_mesh_that_fits_is_chosen_and_says_why(times, expected):
    model = _decoder()

    chosen = choose_mesh(model, world_size=4, device_bytes=int(times * model.num_parameters * 4))

    assert {axis: getattr(chosen, axis) for axis in expected} == expected
    lines = str(chosen).splitlines()
    assert lines[-1].endswith("; fits")
    assert all(line.endswith("; does not fit") for line in lines[1:-1])
    assert chosen.degrees(4)["tp"] == expected["tp"]


def test_too_little_memory_lists_what_was_looked_at():
    with pytest.raises(ValueError, match=r"(?s)dp_shard 2 x tp 2: .* start more ranks|start more"):
        choose_mesh(_decoder(), world_size=4, device_bytes=1000)


def test_auto_without_a_group_says_where_to_call_it():
    with pytest.raises(NoWorldError, match=r"`MeshConfig.auto` was called"):
        MeshConfig.auto(_decoder())
