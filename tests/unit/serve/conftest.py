"""Ready things for the serving tests: a tiny model, its tokenizer, a plain reference."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from nbdist.serve.loopback import LoopbackRanks
from nbdist.train.models.decoder import DecoderConfig, DecoderLM

# tiny models gain nothing from a second thread, and spinning ones starve each other on busy cores
torch.set_num_threads(1)

TEXT = "the quick brown fox jumps over the lazy dog. Zażółć gęślą jaźń 👋🏽 日本語 "


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    made.train_from_iterator([TEXT * 20], trainer)
    return made


@pytest.fixture
def model(tokenizer) -> DecoderLM:
    """A model whose choices differ from token to token: larger weights than a fresh one has."""
    config = DecoderConfig(
        vocab_size=tokenizer.get_vocab_size(),
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        hidden_size=32,
        context_length=96,
        tie_embeddings=False,
    )
    made = DecoderLM(config, seed=3)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return made.eval()


@pytest.fixture
def greedy(model, tokenizer):
    """The plain reference: one prompt at a time, no cache, everything computed anew."""

    @torch.inference_mode()
    def tokens(prompt: str, max_new_tokens: int) -> list[int]:
        ids = tokenizer.encode(prompt).ids
        start, end = len(ids), tokenizer.token_to_id("<|endoftext|>")
        while len(ids) < start + max_new_tokens:
            logits = model(torch.tensor([ids]))[0, -1]
            ids.append(int(logits.argmax()))
            if ids[-1] == end:
                return ids[start:-1]
        return ids[start:]

    def text(prompt: str, max_new_tokens: int) -> str:
        before = tokenizer.encode(prompt).ids
        whole = tokenizer.decode(before + tokens(prompt, max_new_tokens))
        return whole[len(tokenizer.decode(before)) :]

    return SimpleNamespace(tokens=tokens, text=text)


@pytest.fixture
def ranks():
    with LoopbackRanks(2) as made:
        yield made


@pytest.fixture
def one_rank():
    with LoopbackRanks(1) as made:
        yield made


@pytest.fixture
def prompts():
    """Forty prompts of 1 to 40 tokens or so."""
    return [(TEXT * 3)[i : i + 1 + i] for i in range(40)]
