"""The `vllm` engine: what it hands over and refuses, and its books over a stand-in for vLLM.

The stand-in runs in the real child process; the conformance suite runs the real vLLM where it is
installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nbdist.errors import ServeError
from nbdist.messages import Sampling
from nbdist.serve.engine import EngineRequest
from nbdist.serve.engines import make_engine as make_engine_by_name
from nbdist.serve.quantise import quantise
from nbdist.serve.vllm import VllmEngine
from nbdist.serve.vllm_export import check_exportable, export
from nbdist.serve.vllm_params import check_ranges
from nbdist.train.models.decoder import DecoderConfig, DecoderLM

VOCAB = 200


def ask(request_id: str, prompt: list[int], tokens: int = 4, **more) -> EngineRequest:
    end = more.pop("end_token_id", None)
    sampling = Sampling(**{"temperature": 0.0, "max_new_tokens": tokens, **more})
    return EngineRequest(
        request_id=request_id, prompt_ids=prompt, sampling=sampling, end_token_id=end
    )


def counting_llama() -> LlamaForCausalLM:
    """A model for the stand-in, which counts up by its intermediate_size / 16."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def make_engine(monkeypatch):
    """Build an engine over the stand-in; closed at the end."""
    stand_in = str(Path(__file__).parent / "fake_vllm")
    monkeypatch.syspath_prepend(stand_in)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([stand_in, os.environ.get("PYTHONPATH", "")]))
    made = []

    def make(model=None, **options) -> VllmEngine:
        made.append(VllmEngine(model or counting_llama(), **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def finish(engine: VllmEngine) -> tuple[dict[str, list[int]], dict[str, object]]:
    tokens: dict[str, list[int]] = {}
    endings: dict[str, object] = {}
    while engine.num_requests:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason:
                assert output.request_id not in endings
                endings[output.request_id] = output
    return tokens, endings


@pytest.mark.parametrize("tied", [True, False])
def test_export_of_a_decoder_is_a_llama_that_gives_its_logits(tmp_path, tied):
    config = DecoderConfig(
        vocab_size=50, num_layers=2, hidden_size=32, num_heads=4, tie_embeddings=tied
    )
    model = DecoderLM(config, seed=1).eval()
    export(model, tmp_path)

    made = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    tokens = torch.arange(20)[None]
    with torch.inference_mode():
        # float32: the same products, summed in another order
        torch.testing.assert_close(made(tokens).logits, model(tokens), atol=1e-5, rtol=1e-5)


def test_export_refuses_what_vllm_has_no_module_for():
    config = DecoderConfig(vocab_size=64, num_layers=1, hidden_size=32, num_experts=2)

    with pytest.raises(ServeError, match=r"with experts.*engine='native'"):
        check_exportable(DecoderLM(config))
    with pytest.raises(ServeError, match="asked for a Linear"):
        check_exportable(torch.nn.Linear(2, 2))
    with pytest.raises(ServeError, match="weight_bits=None"):
        check_exportable(quantise(counting_llama(), 8))


def test_vllm_that_is_not_installed_is_named_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ServeError, match=r"pip install 'nbdist\[vllm\]'"):
        VllmEngine(counting_llama())


@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        ({"temperature": 3.0}, "temperature=3.0 .* 0 or 0.01 to 2.0"),
        ({"temperature": 0.001}, "temperature=0.001"),
        ({"presence_penalty": -2.5}, "presence_penalty=-2.5 .* 0 or -2.0 to 2.0"),
        ({"frequency_penalty": 9.0}, "engine='native'"),
    ],
)
def test_ranges_that_vllm_would_change_are_refused(sampling, text):
    with pytest.raises(ValueError, match=text):
        check_ranges(Sampling(**sampling))


def test_engine_gives_each_request_its_tokens_and_one_ending(make_engine):
    engine = make_engine(max_batch=2)
    engine.submit(ask("a", [5, 6]))
    engine.submit(ask("b", [30], 9, end_token_id=33))
    engine.submit(ask("c", [90], 2, logprobs=1))
    tokens, endings = finish(engine)

    assert tokens == {"a": [7, 8, 9, 10], "b": [31, 32, 33], "c": [91, 92]}
    assert {name: e.finish_reason for name, e in endings.items()} == {
        "a": "length",
        "b": "stop",
        "c": "length",
    }
    [seen] = endings["c"].logprobs
    assert (seen.token_id, seen.logprob, seen.top_ids) == (92, -0.5, (92,))
    assert engine.wait_seconds() is None


def test_engine_ends_one_that_vllm_refuses_and_serves_the_rest(make_engine):
    engine = make_engine()
    engine.submit(ask("bad", [66]))
    engine.submit(ask("good", [1]))
    tokens, endings = finish(engine)

    assert tokens["good"] == [2, 3, 4, 5]
    assert endings["bad"].finish_reason == "error"
    assert "66 is refused" in endings["bad"].detail


def test_engine_whose_process_is_killed_goes_on_with_the_tokens_it_has(make_engine):
    engine = make_engine()
    engine.submit(ask("a", [1], 6))
    engine.submit(ask("drawn", [1], 6, temperature=1.0, seed=3))
    seen = [token for _ in range(2) for out in engine.step() for token in out.token_ids]
    os.kill(engine.process_id, signal.SIGKILL)
    tokens, endings = finish(engine)

    assert seen == [2, 2, 3, 3]
    assert tokens["a"] == [4, 5, 6, 7]
    # its seed would begin anew
    assert endings["drawn"].finish_reason == "error"
    assert engine.num_restarts == 1


def test_engine_ends_a_request_that_ends_the_process_each_time_and_serves_on(make_engine):
    engine = make_engine()
    engine.submit(ask("before", [1]))
    engine.submit(ask("poison", [77]))
    engine.submit(ask("after", [11]))
    engine.step()
    engine.submit(ask("later", [21]))
    tokens, endings = finish(engine)

    assert endings["poison"].finish_reason == "error"
    assert "vLLM's process has ended" in endings["poison"].detail
    assert tokens["before"] == [2, 3, 4, 5]
    assert tokens["after"] == [12, 13, 14, 15]
    assert tokens["later"] == [22, 23, 24, 25]


def test_engine_hands_over_new_weights_and_marks_what_both_made(make_engine):
    model = counting_llama()
    engine = make_engine(model)
    engine.submit(ask("a", [1]))
    engine.step()
    model.config.intermediate_size = 48
    engine.new_version()
    engine.submit(ask("b", [1]))
    tokens, endings = finish(engine)

    assert tokens == {"a": [5, 8, 11], "b": [4, 7, 10, 13]}
    assert "the weights changed while this request ran" in endings["a"].detail
    assert not endings["b"].detail


def test_engine_forgets_a_cancelled_request_there_as_well(make_engine):
    engine = make_engine()
    engine.submit(ask("a", [1], 30))
    engine.step()
    engine.submit(ask("b", [1], 30))
    assert engine.cancel("a")
    assert engine.cancel("b")
    assert not engine.cancel("b")
    engine.submit(ask("c", [1], 1))
    made = engine.step()

    assert [(out.request_id, out.batch_size) for out in made] == [("c", 1)]


def test_engine_names_an_architecture_that_vllm_lacks(make_engine):
    model = counting_llama()
    model.config.architectures = ["OtherForCausalLM"]
    model.save_pretrained = lambda folder: Path(folder, "config.json").write_text(
        json.dumps({"architectures": ["OtherForCausalLM"]})
    )

    with pytest.raises(ServeError, match=r"no \['OtherForCausalLM'\].*engine='native'"):
        make_engine(model)


def test_engine_leaves_no_weights_and_then_no_process_behind(make_engine, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    engine = make_engine()
    pid = engine.process_id
    assert not list(tmp_path.rglob("*.safetensors"))
    engine.close()

    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.usefixtures("make_engine")
def test_probe_refuses_a_vllm_that_gives_other_tokens():
    with pytest.raises(ServeError, match="engine 'vllm' was probed with a prompt of 20 tokens"):
        make_engine_by_name("vllm", counting_llama())
