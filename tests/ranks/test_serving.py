"""Several ranks answer as one: copies cut over them, and the shards that are being trained."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.distributed.tensor import DTensor

from nbdist.messages import Sampling
from nbdist.serve import Router, serve
from nbdist.serve.adapt import adapted
from nbdist.serve.engine import EngineRequest
from nbdist.serve.follower import Follower
from nbdist.serve.loopback import LoopbackRanks
from nbdist.serve.reference import continue_alone
from nbdist.serve.resident import resident_copy
from nbdist.testing import run_ranks
from nbdist.train import DecoderConfig, DecoderLM, MeshConfig, build_mesh, parallelize

TEXT = "the quick brown fox jumps over the lazy dog. "
# one prompt of two full cache blocks and more: its start is found again
PROMPTS = ["the", TEXT[:20], TEXT * 2, TEXT[10:30]]
GREEDY = {"temperature": 0.0, "max_new_tokens": 10}


def _tokenizer():
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=288, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([TEXT], trainer)
    return made


def _model(*, tied=False):
    """A model whose choices differ from token to token: larger weights than a fresh one has."""
    config = DecoderConfig(
        vocab_size=288,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        hidden_size=32,
        context_length=96,
        tie_embeddings=tied,
    )
    made = DecoderLM(config, seed=3)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return made


def _llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=288,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=96,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def _alone(model, tokenizer):
    """What one process makes of the whole model without a cache, one prompt at a time."""
    face = adapted(resident_copy(model))
    sampling = Sampling(**GREEDY)
    made = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt).ids
        asked = EngineRequest(request_id="alone", prompt_ids=ids, sampling=sampling)
        tokens, _ = continue_alone(face, asked, GREEDY["max_new_tokens"])
        whole = tokenizer.decode(ids + tokens)
        made.append(whole[len(tokenizer.decode(ids)) :])
    return made


def _asked(ranks, replica):
    """What the client gets of a rank that answers; None on the others."""
    if isinstance(replica, Follower):
        return None
    router = Router(ranks, query_seconds=30)
    assert list(router.replicas) == [dist.get_rank()]
    answers = [generation.result(60) for generation in router.generate(PROMPTS, **GREEDY)]
    router.close()
    return answers


def _train(model, optimizer):
    tokens = torch.arange(64).view(2, 32) % 288
    output = model(tokens)
    logits = getattr(output, "logits", output)
    logits.logsumexp(-1).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _copies(rank):
    tokenizer, found = _tokenizer(), {}
    for name, make in {
        "untied": _model,
        "tied": lambda: _model(tied=True),
        "llama": _llama,
        "sharded": lambda: parallelize(_model(), build_mesh()),
    }.items():
        model = make()
        expected = _alone(model, tokenizer)
        with LoopbackRanks(2) as ranks:
            replica = serve(model, tokenizer, tp=2, max_batch=3, port=ranks.ports[rank])
            before = expected, _asked(ranks, replica)
            if name == "sharded":  # the training group is free, and the copy is a copy
                _train(model, torch.optim.AdamW(model.parameters(), lr=0.1))
                before = expected, _asked(ranks, replica)
            dist.barrier()
            replica.stop()
            found[name] = before
            assert not replica.running, name
    return found, [t.name for t in threading.enumerate() if t.name.startswith("nbdist-serve")]


def test_a_copy_cut_over_two_ranks_answers_like_the_whole_model():
    for rank, (found, threads) in enumerate(run_ranks(_copies, 2)):
        assert threads == []
        assert list(found) == ["untied", "tied", "llama", "sharded"]
        for name, (expected, answers) in found.items():
            assert answers == (expected if rank == 0 else None), name


SHARED = {
    "zero3": {},
    "zero2": {"strategy": "zero2"},
    "tp": {"mesh": MeshConfig(tp=2)},
    "ddp": {"strategy": "ddp"},
}


def _places(model):
    parts = (t._local_tensor if isinstance(t, DTensor) else t for t in model.parameters())
    return {part.data_ptr() for part in parts}


def _shared(rank, cases, make):
    """Serve, train a step, serve: what came, and what a whole copy makes, before and after."""
    tokenizer, found = _tokenizer(), {}
    for name, options in cases.items():
        mesh = build_mesh(options.get("mesh"))
        model = parallelize(make(), mesh, strategy=options.get("strategy", "zero3"))
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with LoopbackRanks(dist.get_world_size()) as ranks:
            replica = serve(model, tokenizer, share=True, port=ranks.ports[rank])
            pairs = []
            for step in range(3):
                if step:
                    _train(model, optimizer)
                pairs.append((_alone(model, tokenizer), _asked(ranks, replica)))
                dist.barrier()
            replica.stop()
        assert model.training, name
        found[name] = pairs
    return found


def test_shared_weights_answer_like_a_whole_copy_after_every_step():
    for rank, found in enumerate(run_ranks(_shared, 2, SHARED, _model)):
        assert list(found) == list(SHARED)
        for name, pairs in found.items():
            wholes = [expected for expected, _ in pairs]
            assert wholes[0] != wholes[1] != wholes[2], name
            answers = [answer for _, answer in pairs]
            assert answers == (wholes if rank == 0 or name == "ddp" else [None] * 3), name
