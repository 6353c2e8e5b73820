"""What is on the ranks: completion, inspection, the table of names."""

import re
import threading
import time

import pytest

from nbdist.cluster.names import ask_names
from nbdist.messages import CompleteQuery, InspectQuery

MAKE_NAMES = (
    "%%distributed\n"
    "import torch\n"
    "only_there = torch.nn.Linear(2, 3)\n"
    "def explained(a, b=2):\n"
    "    'Says what it does.'\n"
)


def complete(notebook, code, cursor=None):
    """Return matches and the text that they replace."""
    notebook.client.complete(code, cursor)
    content = notebook.client.get_shell_msg(timeout=30)["content"]
    return content["matches"], code[content["cursor_start"] : content["cursor_end"]], content


def inspect(notebook, code, cursor=None):
    notebook.client.inspect(code, cursor)
    return notebook.client.get_shell_msg(timeout=30)["content"]


@pytest.fixture
def named(notebook):
    """A notebook with names that exist only on its ranks."""
    assert notebook.run(MAKE_NAMES).status == "ok"
    return notebook


@pytest.fixture
def busy_world(world):
    """A world whose ranks run a cell."""
    world.run("import torch\nonly_there = torch.nn.Linear(2, 3)\ndef fn(a):\n    'Says.'")
    errors = []
    running = threading.Event()

    def run():
        source = "import time\nprint('on')\nwhile True: time.sleep(0.01)"
        try:
            for event in world.stream(source):
                if event is not None:
                    running.set()
        except KeyboardInterrupt as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert running.wait(30)
    yield world
    world.interrupt()
    thread.join(30)
    assert len(errors) == 1


# --- completion and inspection --------------------------------------------------------------


@pytest.mark.parametrize(
    "header", ["%%distributed\n", "%%distributed -r 1 --quiet\n", "\n%%distributed\n"]
)
def test_completion_in_a_distributed_cell_finds_names_of_the_ranks(named, header):
    matches, replaced, _ = complete(named, header + "x = 1\nprint(only_th")
    assert matches == ["only_there"]
    assert replaced == "only_th"


def test_completion_finds_attributes_and_counts_from_the_cells_begin(named):
    code = "%%distributed\n'é👋' ; only_there.in_f ; 1"
    matches, replaced, content = complete(named, code, code.index(" ; 1"))
    assert matches == [".in_features"]
    assert replaced == ".in_f"
    for typed in content["metadata"]["_jupyter_types_experimental"]:
        assert code[typed["start"] : typed["end"]] == replaced


def test_completion_asks_the_first_rank_that_the_cell_runs_on(named):
    named.run("%%distributed -r 1\nonly_on_one = 1")
    assert complete(named, "%%distributed -r 1\nonly_on_o")[0] == ["only_on_one"]
    assert complete(named, "%%distributed\nonly_on_o")[0] == []
    assert complete(named, "%%distributed -r 7\nonly_on_o")[0] == []


def test_completion_in_a_local_cell_knows_nothing_of_the_ranks(named):
    named.run("here_alone = 1")
    assert complete(named, "only_th")[0] == []
    assert complete(named, "here_al")[0] == ["here_alone"]
    assert complete(named, "%%distributed\nhere_al")[0] == []
    assert "%%distributed" in complete(named, "%%distr")[0]
    assert named.run("'only_there' in globals()").displays[0]["text/plain"] == "False"


def test_completion_in_auto_mode_asks_the_ranks_but_not_for_local_cells(named):
    named.run("%distributed auto on")
    try:
        assert complete(named, "only_th")[0:2] == (["only_there"], "only_th")
        assert complete(named, "%%local\nonly_th")[0] == []
        assert {"start", "status", "stop"} <= set(complete(named, "%distributed st")[0])
    finally:
        named.run("%distributed auto off")
    assert complete(named, "only_th")[0] == []


def test_inspection_shows_signature_and_docstring_of_the_ranks_object(named):
    code = "%%distributed\nexplained"
    content = inspect(named, code, len(code) - 2)
    assert content["found"]
    text = re.sub(r"\x1b\[[0-9;]*m", "", content["data"]["text/plain"])
    assert "Signature: explained(a, b=2)" in text
    assert "Docstring: Says what it does." in text
    assert not inspect(named, "explained", 3)["found"]


def test_kernel_has_its_own_completion_back_after_unload(bare_notebook):
    check = "ip = get_ipython(); print(ip.kernel.do_complete.__func__.__qualname__)"
    assert bare_notebook.run(check).out == "RankNames.complete\n"
    bare_notebook.run("%unload_ext nbdist")
    assert bare_notebook.run(check).out == "IPythonKernel.do_complete\n"
    bare_notebook.run("%load_ext nbdist")
    bare_notebook.run("%reload_ext nbdist")
    assert complete(bare_notebook, "%%distributed\nzi")[0] == []  # no world, no guess


def test_busy_rank_completes_names_and_attributes_at_once(busy_world):
    started = time.monotonic()
    for source, matches in [
        ("only_th", ["only_there"]),
        ("x = only_there.wei", ["only_there.weight"]),
        ("torch.nn.Linea", None),
        ("nothing.here", []),
    ]:
        query = CompleteQuery(query_id=f"q {source}", source=source, cursor=len(source))
        answer = ask_names(busy_world, query, [0], 5.0)[0]
        assert answer.busy
        reply = answer.reply
        if matches is None:
            assert "torch.nn.Linear" in reply["matches"]
        else:
            assert reply["matches"] == matches
    assert time.monotonic() - started < 2


def test_busy_rank_inspects_without_running_code(busy_world):
    answer = ask_names(busy_world, InspectQuery(query_id="i", source="fn", cursor=1), [1], 5.0)[1]
    text = answer.reply["data"]["text/plain"]
    assert text.splitlines()[:3] == ["Type: function", "Signature: fn(a)", "Docstring: Says."]


# --- who ------------------------------------------------------------------------------------


def test_who_tells_type_shape_and_whether_values_differ(world3):
    world3.run(
        "import torch, numpy as np, types\n"
        "same = torch.arange(6.).reshape(2, 3); other = same + rank\n"
        "large = torch.ones(1 << 19); large_other = torch.ones(1 << 19); large_other[7] += rank\n"
        "half = torch.ones(4, dtype=torch.bfloat16); array = np.arange(4)\n"
        "ragged = torch.zeros(rank + 1); steps = 3; text = {'a': [1, {'b', 'c', 'd'}]}\n"
        "config = types.SimpleNamespace(lr=0.1 * rank); fn = lambda: 1\n"
        "net = torch.nn.Linear(2, 2, bias=False); torch.nn.init.ones_(net.weight)\n"
        "if rank == 0: lonely = 1\n"
        "_hidden = 1"
    )
    table = world3.who()
    differs = {name: table.differs(name) for name in table.rows}
    assert differs == {
        "same": False, "other": True, "large": False, "large_other": True, "half": False,
        "array": False, "ragged": True, "steps": False, "text": False, "config": True,
        "fn": None, "net": False, "lonely": True,
    }  # fmt: skip
    row = table.rows["same"][2]
    assert (row.type_name, row.shape, row.dtype, row.device, row.num_bytes) == (
        "Tensor", "(2, 3)", "float32", "cpu", 24,
    )  # fmt: skip
    assert [table.rows["ragged"][rank].shape for rank in range(3)] == ["(1,)", "(2,)", "(3,)"]
    assert table.is_sampled("large")
    assert not table.is_sampled("same")
    assert set(world3.who("large*").rows) == {"large", "large_other"}


def test_who_shows_a_sharded_tensors_part_without_communication(world3):
    world3.run(
        "import torch\nfrom torch.distributed.tensor import Replicate, Shard, distribute_tensor\n"
        "split = distribute_tensor(torch.arange(12.).reshape(6, 2), mesh, [Shard(0)])\n"
        "copies = distribute_tensor(torch.ones(2), mesh, [Replicate()])"
    )
    table = world3.who("*s*")
    row = table.rows["split"][1]
    assert (row.type_name, row.shape, row.placements) == ("DTensor", "(2, 2)", "S(0)")
    assert table.differs("split") is None
    assert world3.who("copies").differs("copies") is False
    world3.run("if rank == 1: copies.to_local().add_(1)")
    assert world3.who("copies").differs("copies") is True


def test_who_names_busy_ranks(busy_world):
    table = busy_world.who()
    assert set(table.busy) == {0, 1}
    assert table.rows == {}


def test_who_in_a_notebook_is_a_table(named):
    named.run("%%distributed\nwho_a = torch.ones(2, 2)\nwho_b = rank")
    shown = named.run("%distributed who who_*").displays[0]
    lines = [line.split() for line in shown["text/plain"].splitlines()]
    assert lines[0] == ["name", "ranks", "type", "shape", "dtype", "device", "size", "differs"]
    assert lines[1] == ["who_a", "0-1", "Tensor", "(2,", "2)", "float32", "cpu", "16", "B", "no"]
    assert lines[2] == ["who_b", "0-1", "int", "yes"]
    assert "<td style='text-align:left'>who_a</td>" in shown["text/html"]
    shown = named.run("import nbdist; nbdist.current_world().who('who_b')").displays[0]
    assert {"text/plain", "text/html"} <= set(shown)
    assert shown["text/plain"].splitlines()[1].split() == lines[2]
    nothing = named.run("%distributed who no_such*").displays[0]["text/plain"]
    assert nothing == "rank 0-1: no such names"
