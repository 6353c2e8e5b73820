"""A Hugging Face directory, or names of a rank, served by what the command runs on a rank."""

from __future__ import annotations

import gc
import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nbdist.errors import ServeError
from nbdist.serve import Router
from nbdist.serve.loading import carry_out, load_directory
from nbdist.serve.order import ServeOrder
from nbdist.serve.ports import install_port
from nbdist.serve.quantise import weight_bytes
from nbdist.serve.unloading import unload

GREEDY = {"temperature": 0.0, "max_new_tokens": 10}


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


@pytest.fixture
def directory(llama, tokenizer, tmp_path):
    llama.save_pretrained(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def rank(one_rank):
    """A pretended rank whose port is this process's."""
    install_port(one_rank.ports[0])
    yield one_rank
    install_port(None)


def fields(**order) -> dict:
    wanted = ServeOrder(**order).checked(1)
    return {name: getattr(wanted, name) for name in wanted.__slots__}


def alone(llama, tokenizer, prompt: str, num_tokens: int) -> list[int]:
    ids = tokenizer.encode(prompt).ids
    with torch.inference_mode():
        for _ in range(num_tokens):
            ids.append(int(llama(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids


def test_served_directory_answers_as_the_saved_model_does(llama, tokenizer, directory, rank):
    carry_out({}, **fields(what=str(directory)))
    router = Router(rank)

    made = router.generate(["the quick", "fox"], **GREEDY)

    for one in made:
        whole = tokenizer.decode(alone(llama, tokenizer, one.prompt, 10))
        assert one.prompt + one.text == whole
    assert router.replicas[0].weights_bytes == weight_bytes(llama)
    unload(rank)


def test_served_directory_is_held_once(directory, rank, llama):
    before = {id(o) for o in gc.get_objects() if type(o) is LlamaForCausalLM}
    carry_out({}, **fields(what=str(directory)))
    gc.collect()

    made = [o for o in gc.get_objects() if type(o) is LlamaForCausalLM and id(o) not in before]

    assert len(made) == 1
    assert not any(p.requires_grad for p in made[0].parameters())
    assert not made[0].training
    del made
    unload(rank)


def test_loaded_weights_do_not_hang_on_the_files(directory, llama):
    loaded = load_directory(directory)
    for file in directory.glob("*.safetensors"):
        file.write_bytes(bytes(file.stat().st_size))  # in place: a mapped file would show it

    pairs = zip(loaded.parameters(), llama.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_directory_in_8_bits_takes_less_than_the_whole_weights(directory, rank, llama):
    carry_out({}, **fields(what=str(directory), weight_bits=8))

    served = Router(rank).replicas[0]

    assert served.weights_bytes < 0.6 * sum(p.nbytes for p in llama.parameters())
    unload(rank)


@pytest.mark.parametrize(
    "told_in",
    [
        ("tokenizer_config.json", {"eos_token": "{token}"}),
        ("tokenizer_config.json", {"eos_token": {"content": "{token}"}}),
        ("generation_config.json", {"eos_token_id": ["{id}", 0]}),
        ("config.json", {"eos_token_id": "{id}"}),
    ],
)
def test_end_token_of_a_directory_is_the_one_its_files_name(
    llama, tokenizer, directory, rank, told_in
):
    ids = alone(llama, tokenizer, "the quick", 10)
    start = len(tokenizer.encode("the quick").ids)
    end = ids[start + 4]  # the model really makes it
    file, content = told_in
    text = json.dumps(content).replace("{token}", tokenizer.id_to_token(end))
    (directory / "generation_config.json").unlink(missing_ok=True)
    path = directory / file
    told = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(told | json.loads(text.replace('"{id}"', str(end)))))

    carry_out({}, **fields(what=str(directory)))
    [made] = Router(rank).generate("the quick", **GREEDY)

    first = ids.index(end, start)
    assert made.finish_reason == "stop"
    assert "the quick" + made.text == tokenizer.decode(ids[:first])
    unload(rank)


def test_names_of_the_rank_are_served_as_a_copy(model, tokenizer, rank, greedy):
    names = {"model": model, "words": tokenizer, "world_size": 1}

    carry_out(names, **fields(what="model", tokenizer="words", name="small"))

    [made] = Router(rank, "small").generate("fox", **GREEDY)
    assert made.text == greedy.text("fox", 10)
    assert next(model.parameters()).requires_grad
    unload(rank)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ({"words": 1}, "it has no name `model`; assign it in a %%distributed cell"),
        ({"model": 1}, "it has no name `words`"),
        ({"model": 1, "words": 1}, "`model` is a int; name a module"),
    ],
)
def test_names_that_the_rank_lacks_are_told(rank, names, text):
    with pytest.raises(ServeError, match=text):
        carry_out({"world_size": 1} | names, **fields(what="model", tokenizer="words"))
    assert rank.ports[0].handlers == {}
