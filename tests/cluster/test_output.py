"""Output of many ranks as a front end sees it: one real kernel, two real ranks."""

import re
import time

import psutil
import pytest

BAR = """%%distributed
import time
from tqdm.auto import tqdm
for _ in tqdm(range(10), desc='fit'):
    time.sleep(0.08 if rank == 0 else 0.24)
"""


def texts_of(cell):
    return [shown.get("text/plain", "") for shown in cell.displays]


def test_bar_on_two_ranks_is_one_line_that_names_the_slowest(notebook):
    cell = notebook.run(BAR)
    states = texts_of(cell)
    assert any("slowest: rank 1 at " in state for state in states), states
    assert all(state.count("\n") == 0 for state in states)
    assert states[-1].startswith("[0-1] fit: 100%")
    assert "slowest" not in states[-1]
    assert (cell.out, cell.err) == ("", "")


def test_nested_bars_end_as_one_bar_and_never_as_control_characters(notebook):
    source = (
        "%%distributed\nimport time\nfrom tqdm.auto import tqdm\n"
        "for i in tqdm(range(2), desc='outer'):\n"
        "    for j in tqdm(range(5), desc='inner', leave=False): time.sleep(0.1)"
    )
    cell = notebook.run(source)
    states = texts_of(cell)
    assert all("\x1b" not in state and "\r" not in state for state in states)
    assert any("outer" in state and "inner" in state for state in states)
    assert states[-1].startswith("[0-1] outer: 100%")
    assert "inner" not in states[-1]


def test_rich_progress_is_one_bar_and_its_text_comes_once(notebook):
    pytest.importorskip("rich")
    source = (
        "%%distributed\nimport time\nfrom rich.progress import Progress\n"
        "with Progress() as bars:\n"
        "    task = bars.add_task('fit', total=5)\n"
        "    for step in range(5):\n"
        "        time.sleep(0.2); bars.advance(task); bars.console.print('step', step, rank)"
    )
    cell = notebook.run(source)
    colours = re.compile(r"\x1b\[[0-9;]*m")
    lines = colours.sub("", cell.out).splitlines()
    assert sorted(lines) == sorted(f"[{r}] step {i} {r}" for i in range(5) for r in (0, 1))
    assert "\x1b" not in colours.sub("", cell.out)
    assert re.match(r"\[0-1\] fit .* 100%", texts_of(cell)[-1])


def test_clear_output_of_both_ranks_clears_once_a_step(notebook):
    source = (
        "%%distributed\nimport time\nfrom IPython.display import clear_output\n"
        "for step in range(3): clear_output(wait=True); print('step', step); time.sleep(0.1)"
    )
    sent = notebook.send(source)
    shown, cleared = "", 0
    while True:
        message = notebook.client.get_iopub_msg(timeout=30)
        if message["msg_type"] == "clear_output":
            shown, cleared = "", cleared + 1
        elif message["msg_type"] == "stream":
            shown += message["content"]["text"]
        elif message["content"].get("execution_state") == "idle":
            break
    assert notebook.client.get_shell_msg(timeout=10)["parent_header"]["msg_id"] == sent
    assert (shown, cleared) == ("[0-1] step 2\n", 3)


@pytest.mark.parametrize("module", ["tqdm", "tqdm.notebook"])
def test_short_bar_is_one_line_of_text(notebook, module):
    cell = notebook.run(f"%%distributed\nimport {module} as t\nfor _ in t.tqdm(range(3)): pass")
    assert cell.err.startswith("[0-1] 100%")
    assert cell.err.count("\n") == 1
    assert cell.displays == []


def by_rank(text):
    """Lines of each rank, sorted: on a busy machine equal lines may come too late to be folded."""
    lines = {0: [], 1: []}
    for line in text.splitlines():
        label, _, rest = line.partition("] ")
        for rank in {"[0-1": (0, 1), "[0": (0,), "[1": (1,)}[label]:
            lines[rank].append(rest)
    return {rank: sorted(found) for rank, found in lines.items()}


@pytest.mark.parametrize(
    ("source", "out", "err"),
    [
        ("for c in 'abc': print(c, end='', flush=True)", "[0-1] abc\n", ""),
        ("import logging; logging.getLogger().warning('hot %d', rank)", "", "hot 0\nhot 1\n"),
        ("import os; os.write(1, b'from C\\n')", "[0-1] from C\n[0-1] 7\n", ""),
        ("import subprocess; _ = subprocess.run(['echo', 'child'])", "[0-1] child\n", ""),
        ("import sys; print('no', rank, file=sys.stderr)", "", "[0] no 0\n[1] no 1\n"),
        ("print('  1%\\r 50%\\r100%')", "[0-1] 100%\n", ""),
    ],
)
def test_text_of_every_kind_arrives_under_its_ranks(notebook, source, out, err):
    cell = notebook.run(f"%%distributed\n{source}")
    assert cell.status == "ok"
    if "logging" in source:
        lines = sorted(line.split(" root ")[-1] for line in cell.err.splitlines())
        assert "".join(f"{line}\n" for line in lines) == err
        assert [line[:3] for line in sorted(cell.err.splitlines())] == ["[0]", "[1]"]
    else:
        assert (by_rank(cell.out), by_rank(cell.err)) == (by_rank(out), by_rank(err))


def test_figure_of_a_rank_is_a_picture_under_its_rank(notebook):
    pytest.importorskip("matplotlib")
    source = (
        "%%distributed -r 1\nimport matplotlib.pyplot as plt\n_ = plt.plot([0, rank]); plt.show()"
    )
    cell = notebook.run(source)
    assert [data for data in cell.displays if "image/png" in data]
    assert "[1]" in cell.out


def test_late_text_of_a_thread_appears_under_the_cell_that_started_it(notebook):
    source = (
        "%%distributed\nimport threading, time\n"
        "def later():\n    time.sleep(0.5); print('late', rank)\n"
        "threading.Thread(target=later).start()\nprint('now')"
    )
    sent = notebook.send(source)
    assert notebook.wait(sent).out == "[0-1] now\n"
    other = notebook.send("import time; time.sleep(2)")
    seen, deadline = "", time.monotonic() + 20
    while seen.count("late") < 2 and time.monotonic() < deadline:
        message = notebook.client.get_iopub_msg(timeout=20)
        if message["msg_type"] == "stream":
            assert message["parent_header"]["msg_id"] == sent
            seen += message["content"]["text"]
    assert sorted(seen.splitlines()) == ["[0] late 0", "[1] late 1"]
    notebook.wait(other)


def test_silent_cell_says_where_it_is_and_leaves_one_short_line(notebook):
    cell = notebook.run("%%distributed\nimport time\ntime.sleep(4)")
    states = texts_of(cell)
    assert 2 <= len(states) <= 5
    assert all(state.startswith("running ") and "line 2" in state for state in states[:-1])
    assert states[-1].startswith("ranks 0-1: ")
    assert texts_of(notebook.run("%%distributed\nimport time\ntime.sleep(0.5)")) == []


def kernel_of(notebook):
    return psutil.Process(notebook.manager.provisioner.process.pid)


def test_ten_megabytes_of_each_rank_stay_bounded_and_are_whole_in_the_log(notebook):
    source = "%%distributed\nfor i in range(100_000): print(f'{rank} {i:06} ' + 'x' * 91)"
    before = kernel_of(notebook).memory_info().rss
    cell = notebook.run(source, timeout_seconds=120)
    assert cell.status == "ok"
    assert len(cell.out) < 1_200_000
    assert cell.seconds < 60
    assert kernel_of(notebook).memory_info().rss - before < 100 << 20
    tail = texts_of(cell)[-1]
    for rank in (0, 1):
        assert f"`%distributed logs -r {rank}` has them" in tail
        assert f"[{rank}] {rank} 099999 " in cell.out + tail
    log = notebook.run("%distributed logs -r 1", timeout_seconds=120).out
    assert log.count("x" * 91) == 100_000


def test_endless_output_stops_and_leaves_room_for_the_other_rank(notebook):
    source = "%%distributed\nprint('begins', rank)\nwhile rank == 1: print('again', 'and again')"
    sent = notebook.send(source)
    notebook.wait_for_text("and again")
    time.sleep(3)
    notebook.manager.interrupt_kernel()
    stopped = time.monotonic()
    cell = notebook.wait(sent, 120)
    assert cell.ename in ("KeyboardInterrupt", "CellInterrupted")
    assert time.monotonic() - stopped < 10
    peak = notebook.run(
        "%%distributed -r 1\nimport resource as r\nr.getrusage(r.RUSAGE_SELF).ru_maxrss >> 10"
    )
    assert int(peak.out.split()[1]) < 600
    assert notebook.run("%%distributed\nprint('on', rank)").out == "[0] on 0\n[1] on 1\n"
