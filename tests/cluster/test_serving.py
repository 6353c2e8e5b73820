"""`World.serve`, `%distributed serve` and their ends, on real ranks."""

from __future__ import annotations

import ast
import re

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

GREEDY = {"temperature": 0.0, "max_new_tokens": 8}
ASK = f"[g.text for g in nbdist.generate(['the fox', 'a dog'], **{GREEDY})]"


def byte_tokenizer() -> Tokenizer:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


@pytest.fixture(scope="module")
def llama():
    """About 17 MB of weights, enough to be seen in a process's memory."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def directory(llama, tmp_path_factory):
    path = tmp_path_factory.mktemp("llama") / "tiny"
    llama.save_pretrained(path)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def wanted(llama) -> list[str]:
    """What the model alone says to the two prompts of `ASK`, everything computed anew."""
    words, texts = byte_tokenizer(), []
    for prompt in ("the fox", "a dog"):
        ids = words.encode(prompt).ids
        with torch.inference_mode():
            for _ in range(GREEDY["max_new_tokens"]):
                ids.append(int(llama(torch.tensor([ids])).logits[0, -1].argmax()))
        texts.append(words.decode(ids)[len(prompt) :])
    return texts


def test_directory_is_served_listed_asked_and_unloaded_in_a_notebook(notebook, directory, wanted):
    served = notebook.run(f"%distributed serve '{directory}' --replicas 2")
    listed = notebook.run("%distributed serve")
    asked = notebook.run(f"import nbdist\nprint({ASK})")
    unloaded = notebook.run("%distributed unload")
    after = notebook.run("%distributed serve")

    assert served.status == "ok", served.traceback
    assert "reading 17 MB of weights from tiny" in served.out
    rows = [line for line in served.out.splitlines() if line.startswith("default ")]
    assert [row.split()[1] for row in rows] == ["0", "1"]
    assert "nbdist.GenerateWidget()" in served.out
    assert "native" in listed.out
    assert str(wanted) in asked.out
    assert len(re.findall(r"rank \d: default unloaded; resident [\d,]+ MB -> ", unloaded.out)) == 2
    assert "nothing is served" in after.out


def test_directory_is_cut_over_two_ranks_that_answer_as_one(notebook, directory, wanted, llama):
    served = notebook.run(f"%distributed serve '{directory}' --tp 2")
    asked = notebook.run(f"import nbdist\nprint({ASK})")
    held = notebook.run("print(nbdist.current_world().served()[0].weights_bytes)")
    unloaded = notebook.run("%distributed unload")

    assert served.status == "ok", served.traceback
    rows = [line for line in served.out.splitlines() if line.startswith("default ")]
    assert [row.split()[1] for row in rows] == ["0"]
    assert str(wanted) in asked.out
    # half of it, but for norms, which are whole
    assert int(held.out) < 0.52 * sum(p.nbytes for p in llama.parameters())
    assert "default unloaded" in unloaded.out


def test_model_of_the_ranks_is_served_by_its_name_on_one_of_them(notebook, directory, wanted):
    notebook.run(
        "%%distributed\nimport transformers, tokenizers\n"
        f"m = transformers.AutoModelForCausalLM.from_pretrained({str(directory)!r})\n"
        f"t = tokenizers.Tokenizer.from_file({str(directory / 'tokenizer.json')!r})"
    )

    served = notebook.run("%distributed serve m --tokenizer t --replicas 1")
    asked = notebook.run(f"import nbdist\nprint({ASK})")
    missing = notebook.run("%distributed serve m --tokenizer words")
    notebook.run("%distributed unload --now")

    assert served.status == "ok", served.traceback
    assert str(wanted) in asked.out
    assert "it has no name `words`" in missing.evalue


def test_sharded_model_on_fewer_ranks_than_hold_it_is_refused_at_once(notebook):
    made = notebook.run(
        "%%distributed\n"
        "from nbdist.train import DecoderConfig, DecoderLM, parallelize\n"
        "sharded = parallelize(DecoderLM(DecoderConfig.tiny(64)), mesh)\nt = 1"
    )
    refused = notebook.run("%distributed serve sharded --tokenizer t --replicas 1")

    assert made.status == "ok", made.traceback
    assert "it is sharded: all ranks must give their shards; leave the number" in refused.evalue


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("serve no-such-place", "there is no such directory"),
        ("serve no-such-place --replicas 3", "3 replicas were asked for"),
        ("unload other", "model 'other' was to be unloaded, but no rank serves it"),
    ],
)
def test_command_that_cannot_be_carried_out_says_why(notebook, line, text):
    told = notebook.run(f"%distributed {line}")

    assert told.status == "error"
    assert text in told.evalue + told.err  # the front end's words are shown without a traceback


def test_server_of_a_served_directory_ends_with_its_model(notebook, directory):
    served = notebook.run(f"%distributed serve '{directory}' --http --name small")
    url, token = re.search(r"base_url='(.*)', api_key='(.*)'\)", served.out).groups()
    ask = (
        "import httpx\n"
        f"head = {{'Authorization': 'Bearer {token}'}}\n"
        f"print(httpx.get('{url}/models', headers=head).json()['data'][0]['id'])"
    )
    asked = notebook.run(ask)
    notebook.run("%distributed unload small")
    refused = notebook.run(ask)

    assert asked.out.strip() == "small"
    assert refused.ename == "ConnectError"


_BESIDE = """\
import threading, nbdist

def ask_beside():
    panel = nbdist.GenerateWidget(nbdist.current_world())
    heard.append(panel.submit("the fox", **{greedy}).result(60))
    memory = nbdist.current_world().unload()
    heard.append(sorted(memory))
    open({done!r}, "w").close()

heard = []
asking = threading.Thread(target=ask_beside)
"""
_BUSY = """\
%%distributed
import os, time
begun = time.monotonic()
while not os.path.exists({done!r}):
    assert time.monotonic() - begun < 60, "no prompt was answered beside this cell"
    sum(range(10_000))
"""


def test_panel_is_answered_and_unload_done_while_a_cell_runs(notebook, directory, wanted, tmp_path):
    done = str(tmp_path / "done")
    notebook.run(f"%distributed serve '{directory}'")
    notebook.run(_BESIDE.format(greedy=GREEDY, done=done))

    notebook.run("asking.start()")
    cell = notebook.run(_BUSY.format(done=done), timeout_seconds=90)
    heard = notebook.run("asking.join(60)\nprint(heard)").out

    assert cell.status == "ok", cell.traceback  # it ends only when the prompt was answered
    assert ast.literal_eval(heard) == [wanted[0], [0, 1]]


_FIVE_TIMES = """\
world, said, left = nbdist.current_world(), [], []
for _ in range(5):
    router = world.serve({directory!r}, replicas=2)
    said.append([g.text for g in router.generate(["the fox", "a dog"], **{greedy})])
    memory = router.unload()
    left.append([memory[rank].host_bytes[1] for rank in (0, 1)])
    router.close()
print([said, left])
"""


def test_five_times_loaded_and_unloaded_memory_is_flat(notebook, directory, wanted, llama):
    source = _FIVE_TIMES.format(directory=str(directory), greedy=GREEDY)

    ran = notebook.run("import nbdist\n" + source, timeout_seconds=120)

    assert ran.status == "ok", ran.traceback
    said, left = ast.literal_eval(ran.out.splitlines()[-1])
    assert said == [wanted] * 5
    # The first load imports transformers and fills torch's and the allocator's own caches. After
    # that one forgotten copy a turn would be three times the weights; half of them is far more
    # than what a Python process gains and loses by itself.
    weights = sum(p.nbytes for p in llama.parameters())
    for second, last in zip(left[1], left[4], strict=True):
        assert last - second < weights / 2, left


def test_directory_that_ranks_cannot_read_fails_on_them_and_serves_nothing(notebook, directory):
    (directory / "model.safetensors").rename(directory / "aside.safetensors")
    try:
        failed = notebook.run(f"%distributed serve '{directory}'")
    finally:
        (directory / "aside.safetensors").rename(directory / "model.safetensors")

    assert "model.safetensors" in failed.evalue
    assert "nothing is served" in notebook.run("%distributed serve").out
