"""Guessing ahead: it changes no answer, it pays, and it stops when it does not."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from nbdist.messages import Sampling
from nbdist.serve.adapt import adapted
from nbdist.serve.drafting import DraftModelProposer
from nbdist.serve.engine import EngineRequest
from nbdist.serve.native import NativeEngine
from nbdist.serve.pacing import Pace
from nbdist.serve.reference import continue_alone
from nbdist.serve.sequence import Sequence
from nbdist.serve.speculative import NGramProposer, Speculation
from nbdist.train.models.decoder import DecoderConfig, DecoderLM


class EagerPace(Pace):
    """Always guesses as much as it may."""

    def choose(self, row, num_rows):
        return self.max_draft


def speculation_of(proposer, max_draft: int = 4) -> Speculation:
    made = Speculation(proposer, max_draft=max_draft)
    made.pace = EagerPace(max_draft)
    return made


def request(request_id: str, prompt_ids: list[int], **sampling) -> EngineRequest:
    chosen = Sampling(**{"temperature": 0.0, "max_new_tokens": 16, **sampling})
    return EngineRequest(request_id=request_id, prompt_ids=prompt_ids, sampling=chosen)


def row(ids: list[int]) -> Sequence:
    return Sequence(request("a", ids), list(ids))


class CountingModel(DecoderLM):
    """Gives each token a place that repeats: 0 1 2 ... 9 0 1, so that guesses hold."""

    def forward(self, tokens, positions=None, cache=None, keep=None):
        logits = super().forward(tokens, positions, cache, keep)
        seen = tokens if keep is None else tokens[:, keep]
        return logits * 0.01 + 9 * torch.nn.functional.one_hot((seen + 1) % 10, logits.shape[-1])


@pytest.fixture
def counting():
    return CountingModel(DecoderConfig.tiny(24, context_length=96)).eval()


PROPOSERS = {
    "n-gram": lambda model: NGramProposer(shortest=1),
    "draft model": lambda model: DraftModelProposer(model, cache_tokens=96 * 8),
    "bad draft model": lambda model: DraftModelProposer(
        DecoderLM(model.config, seed=9).eval(), cache_tokens=96 * 2, block_size=4
    ),
}


@pytest.mark.parametrize("name", list(PROPOSERS))
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "seed": 5, "top_k": 30}, {"frequency_penalty": 1.0}]
)
def test_speculation_changes_no_token_of_any_request(model, name, sampling):
    rng = random.Random(0)
    engine = NativeEngine(
        model,
        max_batch=3,
        max_step_tokens=24,
        block_size=4,
        cache_tokens=112,
        speculation=speculation_of(PROPOSERS[name](model)),
    )
    requests = [
        request(f"r{n}", [rng.randrange(4) for _ in range(rng.randrange(1, 30))], **sampling)
        for n in range(4)
    ]
    for one in requests:
        engine.submit(one)
    made: dict[str, list[int]] = {one.request_id: [] for one in requests}
    while engine.num_requests:
        for output in engine.step():
            made[output.request_id] += output.token_ids

    face = adapted(model)
    assert made == {one.request_id: continue_alone(face, one, 16)[0] for one in requests}
    assert engine.stats().num_drafted > 0
    assert engine.pool.num_used == 0


@pytest.mark.parametrize("name", ["n-gram", "draft model"])
def test_speculation_with_good_guesses_takes_a_fraction_of_the_steps(counting, name):
    steps = {}
    for speculation in (None, speculation_of(PROPOSERS[name](counting))):
        engine = NativeEngine(counting, speculation=speculation)
        for number in range(3):
            engine.submit(request(f"r{number}", list(range(10)) * 2, max_new_tokens=40))
        while engine.num_requests:
            engine.step()
        steps[speculation is None] = engine.stats().num_steps

    assert steps[True] == 40
    assert steps[False] <= 10
    assert engine.stats().num_accepted == engine.stats().num_drafted


def test_speculation_draws_from_the_distribution_of_the_model(model):
    """Chi-square of three tokens of many draws against their exact probabilities."""
    prompt, number = [1, 2, 1, 2, 1], 800
    engine = NativeEngine(
        model,
        max_batch=64,
        max_waiting=number,
        speculation=speculation_of(DraftModelProposer(model, cache_tokens=64 * 16)),
    )
    sampling = {"temperature": 2.5, "top_k": 3, "max_new_tokens": 3}
    for n in range(number):
        engine.submit(request(f"r{n}", prompt, seed=n, **sampling))
    made: dict[str, tuple[int, ...]] = {}
    while engine.num_requests:
        for output in engine.step():
            made[output.request_id] = (*made.get(output.request_id, ()), *output.token_ids)
    counts = Counter(made.values())

    def follow(ids: tuple[int, ...]) -> dict[tuple[int, ...], float]:
        logits = model(torch.tensor([[*prompt, *ids]]))[0, -1].detach().double()
        best = (logits / 2.5).topk(3)
        shares = best.values.softmax(0).tolist()
        return {(*ids, t): p for t, p in zip(best.indices.tolist(), shares, strict=True)}

    chance = {(): 1.0}
    for _ in range(3):
        chance = {ids: p * q for start, p in chance.items() for ids, q in follow(start).items()}
    assert set(counts) <= set(chance)
    common = [ids for ids, p in chance.items() if p * number >= 5]
    rare = sum(number * p for ids, p in chance.items() if ids not in common)
    cells = [(counts[ids], number * chance[ids]) for ids in common]
    cells.append((number - sum(counts[ids] for ids in common), max(rare, 1e-9)))
    square = sum((seen - mean) ** 2 / mean for seen, mean in cells if mean > 1)
    # 0.999 quantile of chi-square with 27 degrees of freedom, more than there are
    assert square < 55.5
    assert 0 < engine.stats().num_accepted < engine.stats().num_drafted


def test_ngram_proposer_goes_on_as_the_newest_tokens_did_before():
    proposer = NGramProposer(longest=3, shortest=2)

    assert proposer.propose([row([1, 2, 3, 4, 5, 2, 3])], [3]) == [[4, 5, 2]]
    proposer.forget("a")
    assert proposer.propose([row([1, 2, 3, 4])], [3]) == [[]]
    proposer.forget("a")
    assert proposer.propose([row([7, 7, 7])], [2]) == [[7]]


def test_ngram_proposer_prefers_the_newest_place():
    assert NGramProposer().propose([row([1, 2, 8, 1, 2, 9, 1, 2])], [1]) == [[9]]


def test_ngram_proposer_with_sizes_in_the_wrong_order_is_refused():
    with pytest.raises(ValueError, match="shortest=5, longest=4"):
        NGramProposer(shortest=5)


def test_draft_model_proposer_without_room_guesses_nothing(model):
    proposer = DraftModelProposer(model, cache_tokens=16)

    assert proposer.propose([row([1] * 30)], [2]) == [[]]
    proposer.forget("a")
    assert len(proposer.propose([row([1] * 4)], [2])[0]) == 2


def paced(step_seconds, *, acceptance: float) -> Pace:
    """A pace that has seen steps of 1 to 80 tokens and guesses of this acceptance."""
    pace = Pace(4, acceptance=acceptance)
    for num_tokens in list(range(1, 80)) * 3:
        pace.note_step(num_tokens, step_seconds(num_tokens))
    return pace


def test_pace_guesses_for_a_lone_row_and_stops_under_load():
    pace = paced(lambda tokens: 10 + tokens, acceptance=0.6)

    chosen = [pace.choose(pace.row(), rows) for rows in (1, 4, 16, 64)]

    assert chosen[0] == 4
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[-1] == 0


def test_pace_stops_for_a_row_whose_guesses_fail_and_tries_again_now_and_then():
    pace = paced(lambda tokens: 10 + tokens, acceptance=0.6)
    row_pace = pace.row()
    for _ in range(20):
        pace.note_row(row_pace, 4, 0)

    chosen = [pace.choose(row_pace, 2) for _ in range(100)]

    assert chosen.count(1) == 3
    assert chosen.count(0) == 97


def test_pace_counts_what_guesses_cost_to_make():
    pace = paced(lambda tokens: 10 + tokens, acceptance=0.6)
    pace.note_draft(1, 8.0)

    assert pace.choose(pace.row(), 1) == 0


def test_pace_of_no_guess_is_refused():
    with pytest.raises(ValueError, match="max_draft=0"):
        Pace(0)
