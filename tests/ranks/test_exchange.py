"""Checkpoints to and from Hugging Face directories, and every action of the shelf, on ranks."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from nbdist.errors import CheckpointError
from nbdist.testing import run_ranks
from nbdist.train import (
    CheckpointConfig,
    DecoderConfig,
    DecoderLM,
    MeshConfig,
    TextData,
    TrainConfig,
    Trainer,
    build_mesh,
    checkpoint,
    empty_weights,
    export,
    latest,
    list_checkpoints,
    load_pretrained,
    parallelize,
    shakespeare,
    shelf,
)
from nbdist.train.llama import llama_name

VOCABULARY = 280
TOKENS = torch.arange(12)[None]
# float32: two implementations of one formula, of which each rounds in its own order
TOLERANCE = 1e-5


def _decoder(*, tied, seed=0):
    sizes = {"num_layers": 2, "hidden_size": 24, "context_length": 16, "tie_embeddings": tied}
    return DecoderLM(DecoderConfig(vocab_size=VOCABULARY, **sizes), seed=seed)


def _llama(*, tied):
    torch.manual_seed(3)
    sizes = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=tied, **sizes, **heads)
    )


def _whole(parameter):
    full = getattr(parameter, "full_tensor", None)
    return (full() if full else parameter).detach().clone()


def _trainer(model, directory):
    return Trainer(
        model,
        TextData(shakespeare()[:20_000], vocab_size=VOCABULARY, context_length=16),
        TrainConfig(
            num_steps=4,
            global_batch_size=6,
            warmup_steps=2,
            checkpoint=CheckpointConfig(directory=directory, every_steps=2),
        ),
    )


def _save_and_restore(rank, directory):
    """Train a decoder and a transformers model; list and restore the decoder's steps."""
    for tied in (True, False):
        _trainer(_llama_with_loss(tied=tied), directory / f"llama-{tied}").fit()
        trainer = _trainer(_decoder(tied=tied), directory / f"decoder-{tied}")
        losses = trainer.fit().losses
    listed = shelf.table(globals() | {"trainer": trainer}, None)
    told = shelf.restore_step({"trainer": trainer}, None, 2)
    again = trainer.fit().losses
    errors = []
    for names, step in [({}, 2), ({"trainer": trainer}, 3), ({"a": trainer, "b": 1}, 7)]:
        with pytest.raises(CheckpointError) as caught:
            shelf.restore_step(names, None, step)
        errors.append(str(caught.value))
    return losses, listed, told, again, errors


class _Logits(LlamaForCausalLM):
    def forward(self, tokens):
        return super().forward(tokens).logits


def _llama_with_loss(*, tied):
    model = _llama(tied=tied)
    model.__class__ = _Logits
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("exchange")
    return directory, run_ranks(_save_and_restore, 2, directory)[0]


def test_restored_step_trains_on_as_before(saved):
    _, (losses, listed, told, again, errors) = saved

    assert again == losses[2:]  # bit for bit: the same ranks
    assert [line.split()[0] for line in listed.splitlines()[2:]] == ["2", "4"]
    assert "dp_shard=2" in listed
    assert "sizes only" in listed
    assert told.startswith("the trainer is at step 2")
    assert "one trainer is wanted on each rank, and none was found" in errors[0]
    assert "step 3 was asked for, but" in errors[1]
    assert "holds the steps 2, 4; name one of these" in errors[2]


def test_verify_notes_the_time_and_names_a_damaged_file(saved, tmp_path):
    directory = str(saved[0] / "decoder-False")

    assert shelf.verify_steps({}, directory, 2).startswith("1 verified")
    assert "sizes only" not in shelf.table({}, directory).splitlines()[2]
    assert "sizes only" in shelf.table({}, directory).splitlines()[3]

    shard = list_checkpoints(directory)[0] / "__1_0.distcp"
    content = shard.read_bytes()
    shard.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    try:
        with pytest.raises(CheckpointError, match=r"damaged: __1_0.distcp differs"):
            shelf.verify_steps({}, directory, None)
    finally:
        shard.write_bytes(content)
    assert "sizes only" in shelf.table({}, directory).splitlines()[2]
    assert shelf.table({}, str(tmp_path)) == f"no complete checkpoint in {tmp_path}"


@pytest.mark.parametrize("tied", [True, False])
def test_exported_decoder_computes_the_same_in_transformers(saved, tmp_path, tied):
    path = latest(saved[0] / f"decoder-{tied}")
    files = export(path, tmp_path / "out", file_bytes=2**14)
    assert "model.safetensors.index.json" in files
    assert "tokenizer.json" in files
    mine = _decoder(tied=tied)
    checkpoint.load(path, mine)

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()

    torch.testing.assert_close(theirs(TOKENS).logits, mine(TOKENS), atol=TOLERANCE, rtol=0)
    head, embedding = theirs.get_output_embeddings(), theirs.get_input_embeddings()
    assert (head.weight is embedding.weight) == tied


@pytest.mark.parametrize("tied", [True, False])
def test_exported_transformers_model_is_itself_again(saved, tmp_path, tied):
    path = latest(saved[0] / f"llama-{tied}")
    export(path, tmp_path / "out")
    mine = _llama(tied=tied)
    checkpoint.load(path, mine)

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")

    for name, weight in mine.named_parameters():
        assert torch.equal(theirs.get_parameter(name), weight), name
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert ("lm_head.weight" in file.keys()) != tied  # noqa: SIM118 - no mapping
    with pytest.raises(CheckpointError, match="which exists; name a new directory"):
        export(path, tmp_path / "out")


def _import(rank, directory):
    found = []
    plan = {"layers.*.ffn.gate": "column", "layers.*.ffn.up": "column", "layers.*.ffn.down": "row"}
    for mesh, options in [
        (MeshConfig(dp_shard=3), {}),
        (MeshConfig(dp_shard=1, tp=3), {"plan": plan}),
    ]:
        model = _three_headed(seed=1)
        parallelize(model, build_mesh(mesh), **options)
        load_pretrained(model, directory)
        found.append({name: _whole(p) for name, p in model.named_parameters()})
    found += [_import_empty(directory, plan, mesh) for mesh in ({}, {"dp_shard": 1, "tp": 3})]
    errors = []
    for model, place in [(_decoder(tied=True), directory), (_decoder(tied=True), directory / "no")]:
        with pytest.raises(CheckpointError) as caught:
            load_pretrained(model, place)
        errors.append(str(caught.value))
    return found, errors


def _import_empty(directory, plan, mesh):
    """Import into a model that no rank has held whole; a step shows that it can be trained."""
    with empty_weights():
        model = _three_headed(seed=1)
    assert all(p.is_meta for p in model.parameters())
    made = build_mesh(MeshConfig(**mesh))
    with pytest.raises(ValueError, match="DDP and pipelines need whole weights"):
        parallelize(model, made, strategy="ddp") if not mesh else _refuse_pp(model)
    parallelize(model, made, **({"plan": plan} if mesh else {}))
    assert all(p.is_meta for p in model.parameters())
    data = TextData(shakespeare()[:9000], vocab_size=VOCABULARY, context_length=16)
    with pytest.raises(ValueError, match="fill it with load_pretrained"):
        Trainer(model, data, TrainConfig(num_steps=1))
    load_pretrained(model, directory)
    weights = {name: _whole(p).clone() for name, p in model.named_parameters()}
    Trainer(model, data, TrainConfig(num_steps=1)).fit()
    return weights


def _refuse_pp(model):
    parallelize(model, build_mesh(MeshConfig(dp_shard=1, pp=3)))


def _three_headed(seed):
    sizes = {"num_layers": 2, "num_heads": 3, "num_kv_heads": 3, "hidden_size": 24}
    sizes |= {"ffn_multiple": 6}
    return DecoderLM(DecoderConfig(vocab_size=VOCABULARY, context_length=16, **sizes), seed=seed)


def test_import_reads_the_slices_of_each_rank(tmp_path):
    source = _three_headed(seed=0)
    weights = {llama_name(name): p.detach().clone() for name, p in source.named_parameters()}
    half = len(weights) // 2
    placed = {}
    for number, names in enumerate([list(weights)[:half], list(weights)[half:]]):
        save_file({name: weights[name] for name in names}, tmp_path / f"{number}.safetensors")
        placed |= dict.fromkeys(names, f"{number}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))

    # 280 rows on 3 ranks: shards of uneven size
    for found, errors in run_ranks(_import, 3, tmp_path):
        for imported in found:
            for name, weight in source.named_parameters():
                assert torch.equal(imported[name], weight), name
        assert "holds another model: " in errors[0]
        assert "no weights could be read from" in errors[1]
