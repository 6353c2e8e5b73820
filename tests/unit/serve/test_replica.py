"""Replicas on one process: threads, versions, and a training model that notices nothing."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import pytest
import torch

from nbdist.errors import ServeError
from nbdist.messages import GenerateRequest, ModelServed, ServeQuery, TokenEvent, Unhandled
from nbdist.serve import Router, serve
from nbdist.serve.resident import resident_copy
from nbdist.testing import run_ranks
from nbdist.train.models.decoder import DecoderConfig, DecoderLM

GREEDY = {"temperature": 0.0, "max_new_tokens": 12}


@pytest.fixture
def serving(model, tokenizer, ranks):
    replicas = [serve(model, tokenizer, port=port) for port in ranks.ports]
    yield replicas
    for replica in replicas:
        replica.stop()


def training_run(model: DecoderLM, between=lambda: None) -> list[torch.Tensor]:
    """A few AdamW steps with dropout from the global generator; returns all that they made."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        tokens = torch.randint(0, model.config.vocab_size, (2, 16))
        logits = torch.nn.functional.dropout(model(tokens), 0.1)
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        between()
    return [*losses, *(p.detach().clone() for p in model.parameters()), torch.get_rng_state()]


def test_serving_beside_training_leaves_every_bit_of_it_alone(tokenizer, ranks):
    config = DecoderConfig.tiny(tokenizer.get_vocab_size(), context_length=64)
    alone = training_run(DecoderLM(config))
    model = DecoderLM(config)
    running = []

    def serve_and_ask() -> None:
        serve(model, tokenizer, port=ranks.ports[0])
        router = Router(ranks, query_seconds=0.3)
        running.extend(router.submit("the fox", temperature=1.0) for _ in range(3))

    beside = training_run(model, serve_and_ask)
    replica = serve(model, tokenizer, port=ranks.ports[0])
    replica.stop()

    assert all(torch.equal(a, b) for a, b in zip(alone, beside, strict=True))
    assert all(generation.wait(20) for generation in running)


def test_serve_again_bumps_the_version_serves_the_new_weights_and_ends_old_requests(
    model, tokenizer, one_rank
):
    first = serve(model, tokenizer, port=one_rank.ports[0])
    router = Router(one_rank)
    before = router.submit("fox", **GREEDY).result(20)
    long = [router.submit("fox", temperature=0.0, max_new_tokens=90) for _ in range(30)]
    with torch.no_grad():
        model.layers[0].ffn.up.weight.mul_(-1)
    second = serve(model, tokenizer, port=one_rank.ports[0])
    after = router.submit("fox", **GREEDY).result(20)

    assert all(generation.wait(20) for generation in long)
    assert {g.finish_reason for g in long} <= {"length", "cancelled"}
    assert any("version 2 of model 'default' took over" in g.detail for g in long)
    assert (first.served.version, second.served.version) == (1, 2)
    assert router.replicas[0].version == 2
    assert "stopped" in repr(first)
    assert "serving" in repr(second)
    assert before != after
    second.stop()


def test_replica_stop_frees_its_thread_and_weights_and_unhooks_the_rank(model, tokenizer, one_rank):
    replica = serve(model, tokenizer, port=one_rank.ports[0])
    router = Router(one_rank)
    running = router.submit("fox", temperature=0.0, max_new_tokens=90)
    resident = weakref.ref(
        next(o for o in gc.get_objects() if type(o) is DecoderLM and o is not model)
    )

    replica.stop()
    replica.stop()
    gc.collect()

    assert running.wait(20)
    assert not [t for t in threading.enumerate() if t.name.startswith("nbdist-serve")]
    assert resident() is None
    assert one_rank.ports[0].handlers == {}
    with pytest.raises(ServeError, match="no model named 'default' is served by rank 0"):
        Router(one_rank)


def tensor_bytes() -> int:
    """Bytes of all tensors that are alive, each storage once."""
    gc.collect()
    kinds = (torch.Tensor, torch.nn.Parameter)  # not a compiler's FakeTensor: it has no bytes
    tensors = [o for o in gc.get_objects() if type(o) in kinds]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def test_five_times_served_and_stopped_leaves_no_more_memory_in_use(model, tokenizer, one_rank):
    before, served, left = tensor_bytes(), [], []
    for _ in range(5):
        replica = serve(model, tokenizer, port=one_rank.ports[0])
        router = Router(one_rank)
        router.submit("fox", **GREEDY).result(20)
        served.append(tensor_bytes() - before)
        router.close()
        replica.stop()
        left.append(tensor_bytes() - before)

    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    assert min(served) > weights  # the copy and its cache were there
    assert left == [0] * 5


def test_two_models_on_a_rank_answer_by_name(model, tokenizer, one_rank):
    heard = []
    one_rank.subscribe(ModelServed, lambda _, event: heard.append((event.model, event.query_id)))
    big = serve(model, tokenizer, "big", port=one_rank.ports[0])
    small = serve(model, tokenizer, "small", port=one_rank.ports[0])

    assert Router(one_rank, "small").submit("fox", **GREEDY).result(20)
    big.stop()
    assert Router(one_rank, "small").submit("fox", **GREEDY).result(20)
    with pytest.raises(ServeError, match=r"serve\(model, tokenizer, 'big'\)"):
        Router(one_rank, "big", query_seconds=0.2)
    small.stop()
    assert ("big", "") in heard


def test_request_for_a_model_that_is_not_served_ends_by_error(model, tokenizer, one_rank):
    replica = serve(model, tokenizer, "other", port=one_rank.ports[0])
    arrived = threading.Event()
    heard = []
    one_rank.subscribe(TokenEvent, lambda _, event: (heard.append(event), arrived.set()))

    one_rank.post(0, GenerateRequest(request_id="r", model="missing", prompt="fox"))

    assert arrived.wait(10)
    assert heard[0].finish_reason == "error"
    assert "rank 0 serves ['other']" in heard[0].detail
    replica.stop()


def test_rank_without_a_replica_answers_unhandled(one_rank):
    arrived = threading.Event()
    heard = []
    one_rank.subscribe(Unhandled, lambda _, event: (heard.append(event), arrived.set()))

    one_rank.post(0, ServeQuery(query_id="q"))

    assert arrived.wait(10)
    assert heard == [Unhandled(rank=0, unhandled="serve_query", topic="q")]


def test_replica_whose_thread_fails_ends_its_requests_and_its_name(
    model, tokenizer, one_rank, monkeypatch
):
    replica = serve(model, tokenizer, port=one_rank.ports[0])
    router = Router(one_rank)

    entered, go_on = threading.Event(), threading.Event()

    def fail(_):
        entered.set()
        assert go_on.wait(20)
        raise OSError("the disk is gone")

    monkeypatch.setattr("nbdist.serve.batcher.Batcher.step", fail)
    made = [router.submit("in the step")]
    assert entered.wait(20)
    made += [router.submit("still in the inbox") for _ in range(3)]
    go_on.set()

    assert all(generation.wait(20) for generation in made)
    assert {generation.finish_reason for generation in made} == {"error"}
    assert "ended by OSError: the disk is gone; call `serve` again" in made[3].detail
    assert not replica.running


@pytest.mark.parametrize("speculation", ["ngram", "draft model"])
def test_replica_that_guesses_ahead_gives_the_same_text(
    model, tokenizer, one_rank, greedy, speculation
):
    guess = speculation if speculation == "ngram" else model
    replica = serve(model, tokenizer, speculation=guess, port=one_rank.ports[0])

    made = Router(one_rank).generate(["the fox", "the lazy dog"], **GREEDY)

    assert [g.text for g in made] == [greedy.text(g.prompt, 12) for g in made]
    assert "engine='native'" in repr(replica)
    replica.stop()


def test_replica_with_a_small_cache_refuses_what_can_never_fit(model, tokenizer, one_rank):
    replica = serve(model, tokenizer, cache_tokens=32, port=one_rank.ports[0])
    long, short = Router(one_rank).generate(["the fox " * 20, "fox"], **GREEDY)

    assert "the engine's cache of 32" in long.detail
    assert short.finish_reason == "length"
    replica.stop()


def test_serve_with_a_draft_model_of_another_vocabulary_is_refused(model, tokenizer, one_rank):
    other = DecoderLM(DecoderConfig.tiny(7, context_length=96))

    with pytest.raises(ValueError, match="the draft model has vocab_size=7"):
        serve(model, tokenizer, speculation=other, port=one_rank.ports[0])


def test_serve_outside_a_rank_says_where_to_call_it(model, tokenizer):
    with pytest.raises(ServeError, match="outside a rank"):
        serve(model, tokenizer)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_batch": 0}, "max_batch=0"),
        ({"end_token": "<nope>"}, "<nope>"),
        ({"engine": "other"}, "engine='other' is unknown"),
        ({"speculation": "eagle"}, "'eagle' is neither"),
    ],
)
def test_serve_with_a_bad_argument_names_it(model, tokenizer, one_rank, options, text):
    with pytest.raises(ValueError, match=text):
        serve(model, tokenizer, port=one_rank.ports[0], **options)


def test_resident_copy_shares_no_memory_and_keeps_ties_and_buffers():
    class Tied(torch.nn.Module):
        def __init__(self, config) -> None:
            super().__init__()
            self.config = config
            self.embedding = torch.nn.Embedding(5, 3)
            self.head = torch.nn.Linear(3, 5, bias=False)
            self.head.weight = self.embedding.weight
            self.register_buffer("scale", torch.arange(3.0), persistent=False)

    model = Tied(config=None)
    with pytest.raises(ServeError, match="has no `config`"):
        resident_copy(model)
    model.config = object()
    copy = resident_copy(torch.compile(model, backend="eager"))

    assert copy.head.weight.data_ptr() == copy.embedding.weight.data_ptr()
    assert torch.equal(copy.embedding.weight, model.embedding.weight)
    assert copy.embedding.weight.data_ptr() != model.embedding.weight.data_ptr()
    assert torch.equal(copy.scale, model.scale)
    assert not copy.training
    assert not any(p.requires_grad for p in copy.parameters())


def test_resident_copy_of_a_model_without_some_weights_names_them(model):
    del model.layers[1].ffn.up.weight

    with pytest.raises(ServeError, match=r"no weights for \['layers.1.ffn.up.weight'\]"):
        resident_copy(model)


def test_resident_copy_of_an_edited_model_says_what_does_not_fit(model):
    model.norm.weight = torch.nn.Parameter(torch.ones(7))

    with pytest.raises(ServeError, match="do not fit a copy built from its config"):
        resident_copy(model)


def copy_of_sharded(rank: int) -> bool:
    """Shard, run, and copy in the middle of it; equal to the whole model on every rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    config = DecoderConfig.tiny(97, context_length=16)
    whole, model = DecoderLM(config, seed=1), DecoderLM(config, seed=1)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    tokens = torch.arange(8)[None]
    model(tokens).sum()  # without a backward, the root's weights stay gathered

    copy = resident_copy(model)

    model(tokens).sum().backward()
    wanted = whole.state_dict()
    return (
        type(copy) is DecoderLM
        and torch.equal(copy(tokens), whole(tokens))
        and all(torch.equal(t, wanted[n]) for n, t in copy.state_dict().items())
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_resident_copy_of_fsdp_shards_is_the_whole_model_on_every_rank(world_size):
    assert run_ranks(copy_of_sharded, world_size) == [True] * world_size


def test_importing_serve_and_router_brings_no_torch():
    code = (
        "import sys, nbdist.serve; from nbdist.serve import Router, Generation, generate; "
        "sys.exit(sum(name in sys.modules for name in ('torch', 'IPython', 'ipyparallel')))"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_serve_module_with_an_unknown_name_lists_its_names():
    import nbdist.serve

    with pytest.raises(AttributeError, match=r"no attribute 'server'; it has \['serve'"):
        _ = nbdist.serve.server
