"""A model of transformers served beside its training, by each engine."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nbdist.serve import Router, serve


@pytest.fixture
def llama(tokenizer):
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=96,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    made = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return made


def alone(llama, tokenizer, prompt: str, num_tokens: int) -> str:
    start = tokenizer.encode(prompt).ids
    ids = list(start)
    with torch.inference_mode():
        while len(ids) < len(start) + num_tokens:
            ids.append(int(llama(torch.tensor([ids])).logits[0, -1].argmax()))
    return tokenizer.decode(ids)[len(prompt) :]


@pytest.mark.parametrize("engine", ["auto", "hf", "reference"])
def test_serve_of_a_transformers_model_equals_it_and_leaves_it_alone(
    llama, tokenizer, one_rank, engine
):
    replica = serve(llama, tokenizer, engine=engine, port=one_rank.ports[0])
    prompts = ["the quick brown", "fox", "the lazy dog. the lazy dog"]
    router = Router(one_rank)
    made = router.generate(prompts, temperature=0.0, max_new_tokens=10)

    assert [g.text for g in made] == [alone(llama, tokenizer, p, 10) for p in prompts]
    assert router.replicas[0].engine == {"auto": "native"}.get(engine, engine)
    assert llama.config._attn_implementation == "sdpa"
    assert llama.training
    replica.stop()
