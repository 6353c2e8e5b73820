"""Several ranks answer as one: copies cut over them, and the shards that are being trained."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import _global_optimizer_post_hooks

from nbdist.messages import Sampling
from nbdist.serve import Router, serve, weights
from nbdist.serve.adapt import adapted
from nbdist.serve.engine import EngineRequest
from nbdist.serve.follower import Follower
from nbdist.serve.loopback import LoopbackRanks
from nbdist.serve.reference import continue_alone
from nbdist.serve.resident import resident_copy
from nbdist.serve.shards import shared_shards
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
            for step in range(2):
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
            assert wholes[0] != wholes[1], name
            answers = [answer for _, answer in pairs]
            assert answers == (wholes if rank == 0 or name == "ddp" else [None] * 2), name


def test_uneven_shards_of_three_ranks_answer_like_a_whole_copy():
    first, *others = run_ranks(_shared, 3, {"zero3": {}}, _llama)

    for expected, answers in first["zero3"]:
        assert answers == expected
    assert all(answer is None for found in others for _, answer in found["zero3"])


def _in_training(rank, when, options):
    """Train until all prompts are answered; the weights are written and keep their values."""
    weights._PATIENCE_SECONDS = 60.0  # a slow machine is still training
    tokenizer = _tokenizer()
    model = parallelize(_model(), build_mesh(options.get("mesh")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    expected = _alone(model, tokenizer)
    with LoopbackRanks(2) as ranks:
        replica = serve(
            model, tokenizer, share=True, when=when, steps_between=2, port=ranks.ports[rank]
        )
        _train(model, optimizer)  # from here on it is in training
        num_before = replica.stats().num_steps
        running = []
        if rank == 0:
            router = Router(ranks, query_seconds=30)
            running = [router.submit(prompt, **GREEDY) for prompt in PROMPTS]
        num_updates = 1
        while _on_any_rank(any(one.finish_reason is None for one in running)):
            _train(model, optimizer)
            num_updates += 1
            assert num_updates < 2000, "the prompts were never answered"
        stats = replica.stats()
        replica.stop()
        _train(model, optimizer)  # where the others hear that there are no more turns
    answers = [(one.result(0), one.detail) for one in running]
    num_steps = stats.num_steps - num_before
    return expected, answers, stats, (num_steps, num_updates), len(_global_optimizer_post_hooks)


def _on_any_rank(value):
    told = torch.tensor(float(value))
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return bool(told)


@pytest.mark.parametrize(
    ("when", "name"), [("beside", "zero3"), ("beside", "tp"), ("between_steps", "zero3")]
)
def test_prompts_are_answered_while_shards_are_trained(when, name):
    first, second = run_ranks(_in_training, 2, when, SHARED[name])

    expected, answers, stats, (num_steps, num_updates), num_hooks = first
    assert [text for text, _ in answers] == expected
    assert stats.num_updates == num_updates == second[3][1]
    assert stats.held_seconds > 0
    assert num_hooks == second[4] == 0
    if when == "between_steps":
        assert 0 < num_steps <= 2 * num_updates
        # ten tokens at two an update: all span several
        assert all("of both versions" in detail for _, detail in answers)


def _tensor_bytes():
    """Bytes of all tensors that are alive, each storage once."""
    gc.collect()
    found = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    plain = [t for t in found if not isinstance(t, DTensor) and not t.is_meta]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in plain}
    return sum(storages.values())


def _on_two_axes(rank):
    """FSDP over tensor parallelism on four ranks; copies cut over two make two replicas."""
    tokenizer, found = _tokenizer(), {}
    model = parallelize(_model(tied=True), build_mesh(MeshConfig(dp_shard=2, tp=2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = _tensor_bytes()
    view = shared_shards(model)
    more = _tensor_bytes() - before
    del view
    with LoopbackRanks(4) as ranks:
        for name, options in {"share": {"share": True}, "copy": {"tp": 2}}.items():
            _train(model, optimizer)
            replica = serve(model, tokenizer, **options, port=ranks.ports[rank])
            pairs = [(_alone(model, tokenizer), _asked(ranks, replica))]
            dist.barrier()
            if name == "share":
                _train(model, optimizer)
                pairs.append((_alone(model, tokenizer), _asked(ranks, replica)))
            dist.barrier()
            found[name] = pairs
    replica.stop()
    own = sum(p.to_local().nbytes for p in model.parameters() if isinstance(p, DTensor))
    return found, more, own


def test_two_axes_share_their_memory_and_answer_like_a_whole_copy():
    for rank, (found, more, own) in enumerate(run_ranks(_on_two_axes, 4)):
        assert own > 10_000
        assert more < 1_000  # the numbers of the ranks in its meshes
        for name, pairs in found.items():
            answers = rank == 0 if name == "share" else rank % 2 == 0
            for expected, answer in pairs:
                assert answer == (expected if answers else None), name


def _ends(rank):
    """One rank leaves alone, first the one that follows, then the one that answers."""
    tokenizer, model, found = _tokenizer(), _model(), []
    for who in (1, 0):
        with LoopbackRanks(2) as ranks:
            replica = serve(model, tokenizer, tp=2, port=ranks.ports[rank])
            asked = None
            if rank == 0:
                router = Router(ranks, query_seconds=30)
                asked = [router.submit("the", max_new_tokens=90) for _ in range(20)]
            if rank == who:
                replica.stop(timeout_seconds=0.1 if who else 10)
            replica._thread.join(30)
            found.append((who, replica.running, len(ranks.ports[rank].handlers)))
            if asked:
                assert all(one.wait(30) for one in asked)
                found.append({one.finish_reason for one in asked})
                found.append([one.detail for one in asked if one.finish_reason == "error"][:1])
    return found


def test_one_rank_that_leaves_ends_the_replica_on_all():
    first, second = run_ranks(_ends, 2)

    assert second == [(1, False, 0), (0, False, 0)]
    assert [found for found in first if isinstance(found, tuple)] == second
    assert "error" in first[1]
    assert "another rank has left it; that rank's log says why; call `serve` again" in first[2][0]
    assert "cancelled" in first[4]


def _in_turn(rank):
    """A replica of one rank each, then one of both: the second rank answers no more."""
    tokenizer, model = _tokenizer(), _model()
    with LoopbackRanks(2) as ranks:
        alone = serve(model, tokenizer, port=ranks.ports[rank])
        together = serve(model, tokenizer, tp=2, port=ranks.ports[rank])
        answers = _asked(ranks, together)
        dist.barrier()
        again = serve(model, tokenizer, port=ranks.ports[rank])
        together._thread.join(30)
        found = alone.running, together.running, again.served.version, again.running
        again.stop()
    return answers == _alone(model, tokenizer), found


def test_a_replica_of_two_ranks_takes_over_and_is_taken_over():
    assert run_ranks(_in_turn, 2) == [
        (True, (False, False, 3, True)),
        (False, (False, False, 3, True)),
    ]
