"""Prompts to a real world: shards that a cell trains meanwhile, and a copy cut over ranks."""

from __future__ import annotations

import threading

import pytest

from nbdist.errors import RemoteCellError, ServeError
from nbdist.serve import Router

SETUP = """
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from nbdist.serve import serve
from nbdist.train import DecoderConfig, DecoderLM, MeshConfig, build_mesh, parallelize

text = "the quick brown fox jumps over the lazy dog. "
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
tokenizer.train_from_iterator([text], trainers.BpeTrainer(
    vocab_size=288, initial_alphabet=alphabet, show_progress=False))
config = DecoderConfig(vocab_size=288, num_layers=2, hidden_size=32, context_length=96)
model = parallelize(DecoderLM(config), build_mesh())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

def train_step():
    tokens = torch.arange(64).view(2, 32)
    model(tokens).logsumexp(-1).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

# as long as the client asks: the ranks agree on when it has ended
TRAIN = """
import pathlib, torch.distributed as dist
asked = torch.ones(1)
while asked.item():
    train_step()
    asked.fill_(not pathlib.Path(flag).exists())
    dist.all_reduce(asked, dist.ReduceOp.MIN)
"""


@pytest.fixture(scope="module")
def training(world):
    world.run(SETUP)
    return world


def test_prompts_are_answered_while_a_cell_trains_the_same_shards(training, tmp_path):
    training.push(flag=str(tmp_path / "stop"))
    training.run("replica = serve(model, tokenizer, share=True)")
    router = Router(training)
    assert list(router.replicas) == [0]
    cell = threading.Thread(target=training.run, args=(TRAIN,))
    cell.start()
    while not router.stats()[0].num_updates:
        assert cell.is_alive()
    made = router.generate(["the fox", "dog"], temperature=0.0, max_new_tokens=30)
    trains_still = cell.is_alive()
    (tmp_path / "stop").touch()
    cell.join(30)

    after = router.generate(["the fox"], temperature=0.0, max_new_tokens=5)
    stats = router.stats()[0]
    training.run("replica.stop()")

    assert trains_still
    assert not cell.is_alive()
    assert {one.finish_reason for one in [*made, *after]} == {"length"}
    assert any("of both versions" in one.detail for one in made)
    assert after[0].detail == ""
    assert stats.num_updates > 1
    assert 0 < stats.held_fraction < 1
    with pytest.raises(ServeError, match="no model named 'default' is served"):
        Router(training)


def test_a_copy_cut_over_the_ranks_answers_like_a_whole_one(training):
    training.run("replica = serve(model, tokenizer, 'cut', tp=2)")
    training.run("whole = serve(model, tokenizer, 'whole')")
    answers = {}
    for name in ("cut", "whole"):
        router = Router(training, name)
        made = router.generate(["the fox", "dog"], temperature=0.0, max_new_tokens=8)
        answers[name] = [one.text for one in made]
        assert list(router.replicas) == ([0] if name == "cut" else [0, 1])
    training.run("replica.stop(); whole.stop()")

    assert answers["cut"] == answers["whole"]


def test_a_cell_whose_groups_are_freed_ends_the_replica_and_serve_again_works(training):
    training.run("replica = serve(DecoderLM(config), tokenizer, tp=2)")
    with pytest.raises(RemoteCellError, match="no data"):
        training.run(
            "import torch.distributed as dist\n"
            "if rank == 0: raise ValueError('no data')\n"
            "dist.all_reduce(torch.ones(1))"
        )

    ended = training.run("replica._thread.join(30); print(replica.running)")
    with pytest.raises(ServeError, match="no model named 'default' is served"):
        Router(training)
    training.run("replica = serve(DecoderLM(config), tokenizer, tp=2)")
    again = Router(training).generate(["the"], max_new_tokens=4)[0]
    training.run("replica.stop()")

    assert all(text.endswith("False\n") for text in ended.text.values())
    assert again.finish_reason == "length"
