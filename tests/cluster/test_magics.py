"""The magics as a front end sees them: one real kernel, real ranks."""

import subprocess
import sys

import psutil
import pytest


def test_status_shows_a_table_of_ranks(notebook):
    text = notebook.run("%distributed status").displays[0]["text/plain"]
    assert "2 ranks, process group" in text
    assert text.splitlines()[1].split() == ["rank", "host", "pid", "device", "memory", "state"]
    assert [line.split()[0] for line in text.splitlines()[2:]] == ["0", "1"]


def test_cell_shows_equal_lines_once_and_values(notebook):
    cell = notebook.run("%%distributed\nprint('same')\nprint('rank', rank)\n{'a': 1}")
    assert cell.out == "[0-1] same\n[0] rank 0\n[1] rank 1\n[0-1] {'a': 1}\n"
    assert cell.status == "ok"


def test_cell_on_one_rank_keeps_its_label(notebook):
    assert notebook.run("%%distributed -r 1\nrank").out == "[1] 1\n"


def test_failing_cell_fails_with_the_notebooks_cell_number(notebook):
    source = "%%distributed\nprint('before')\nif rank == 1: raise ValueError('boom')"
    cell = notebook.run(source)
    count = notebook.run("get_ipython().execution_count").displays[0]["text/plain"]
    assert cell.status == "error"
    assert cell.ename == "RemoteCellError"
    assert cell.evalue == "rank 1 raised ValueError: boom"
    assert f"In[{int(count) - 1}]" in cell.traceback.replace("\x1b[32m", "").replace("\x1b[39m", "")
    assert cell.out == "[0-1] before\n"


def test_quiet_cell_that_fails_shows_its_text_then_the_error(notebook):
    cell = notebook.run("%%distributed --quiet\nprint('x'); 1/0")
    assert cell.out == "[0-1] x\n"
    assert cell.ename == "RemoteCellError"
    assert notebook.run("%%distributed --quiet\nprint('x')").out == ""


@pytest.mark.parametrize(
    ("source", "ename", "text"),
    [
        ("%%distributed -r 9\n1", "UsageError", "this world has ranks 0 to 1: rank 9"),
        ("%%distributed -r 0;1\n1", "UsageError", "write numbers and slices"),
        ("%%distributed --timeout -3\n1", "UsageError", "must be more than 0 seconds"),
        ("%%distributed --tiemout\n1", "UsageError", "type `%%distributed --help`"),
        ("%distributed begin", "UsageError", "invalid choice: 'begin'"),
        ("%distributed start -n 0", "UsageError", "runs already"),
        (
            "%distributed push nothing_here",
            "UsageError",
            "this notebook has no name 'nothing_here'",
        ),
        ("%%distributed\nx = = 2", "CellSyntaxError", "invalid syntax"),
    ],
)
def test_mistake_is_answered_before_any_rank_is_touched(notebook, source, ename, text):
    cell = notebook.run(source)
    assert cell.status == "error"
    assert text in cell.err + cell.evalue
    assert ename in cell.err + cell.ename


def test_interrupt_is_a_keyboard_interrupt_and_the_next_cell_runs(notebook):
    sent = notebook.send("%%distributed\nn = 0\nprint('on')\nwhile True: n += 1")
    notebook.wait_for_text("on")
    notebook.manager.interrupt_kernel()
    cell = notebook.wait(sent)
    assert (cell.status, cell.ename) == ("error", "KeyboardInterrupt")
    assert cell.seconds < 2
    assert notebook.run("%%distributed\nprint(n > 0)").out == "[0-1] True\n"


def test_interrupt_frees_a_rank_blocked_in_a_collective(notebook):
    source = (
        "%%distributed\nimport torch, torch.distributed as dist, time\nprint('on')\n"
        "dist.barrier() if rank == 0 else time.sleep(60)"
    )
    sent = notebook.send(source)
    notebook.wait_for_text("on")
    notebook.manager.interrupt_kernel()
    cell = notebook.wait(sent)
    assert (cell.status, cell.ename) == ("error", "KeyboardInterrupt")
    assert cell.seconds < 4
    total = "%%distributed\nx = torch.ones(1); dist.all_reduce(x); print(x.item())"
    assert notebook.run(total).out == "[0-1] 2.0\n"


def test_interrupt_of_a_local_cell_leaves_the_ranks_alone(notebook):
    notebook.run("%%distributed\nuntouched = rank")
    sent = notebook.send("print('local')\nwhile True: pass")
    notebook.wait_for_text("local")
    notebook.manager.interrupt_kernel()
    assert notebook.wait(sent).ename == "KeyboardInterrupt"
    assert notebook.run("%%distributed\nprint(untouched)").out == "[0] 0\n[1] 1\n"


def test_push_and_pull_never_overwrite_a_local_name(notebook):
    notebook.run("a = 5\n%distributed push a")
    notebook.run("%%distributed\na += rank")
    refused = notebook.run("%distributed pull a")
    assert refused.status == "error"
    assert "has a name 'a' of its own" in refused.err
    notebook.run("%distributed pull a --as a_by_rank")
    assert notebook.run("(a, a_by_rank)").displays[0]["text/plain"] == "(5, {0: 5, 1: 6})"


def test_local_namespace_gets_nothing_from_a_distributed_cell(notebook):
    notebook.run("%%distributed\nonly_on_ranks = 1")
    assert notebook.run("'only_on_ranks' in globals()").displays[0]["text/plain"] == "False"


def test_auto_mode_sends_plain_cells_to_the_ranks(notebook):
    notebook.run("%distributed auto on")
    try:
        assert notebook.run("print(world_size)").out == "[0-1] 2\n"
        assert notebook.run("%%local\nprint('here')").out == "here\n"
    finally:
        assert notebook.run("%distributed auto off").status == "ok"
    assert notebook.run("print('here')").out == "here\n"


def test_tqdm_is_text_under_its_rank(notebook):
    source = "%%distributed -r 0\nfrom tqdm.auto import tqdm\nfor _ in tqdm(range(3)): pass"
    cell = notebook.run(source)
    assert cell.err.startswith("[0] 100%")
    assert cell.displays == []


def test_update_of_a_display_reaches_the_notebook(notebook):
    source = (
        "%%distributed -r 0\nfrom IPython.display import display\n"
        "h = display('a', display_id=True); h.update('b')"
    )
    assert [d["text/plain"] for d in notebook.run(source).displays] == ["'a'", "'b'"]


def test_logs_hold_what_a_rank_wrote(notebook):
    notebook.run("%%distributed\nprint('for the log', rank)")
    assert notebook.run("%distributed logs -r 1 --tail 1").out == "--- rank 1 ---\nfor the log 1\n"


def test_commands_complete(notebook):
    notebook.client.complete("%distributed st")
    reply = notebook.client.get_shell_msg(timeout=30)
    assert {"start", "status", "stop"} <= set(reply["content"]["matches"])


def test_cell_without_a_world_says_how_to_start(bare_notebook):
    cell = bare_notebook.run("%%distributed\n1")
    assert cell.ename == "NoWorldError"
    assert "type `%distributed start -n 2`" in cell.evalue


def processes_of(notebook):
    source = "import nbdist; print([int(p) for p, _ in nbdist.current_world().record.processes])"
    processes = [psutil.Process(pid) for pid in eval(notebook.run(source).out)]
    return [q for p in processes for q in (p, *p.children(recursive=True))]


@pytest.mark.parametrize("way", ["restart", "shutdown", "kill"])
def test_kernel_that_ends_leaves_no_process(bare_notebook, way):
    assert bare_notebook.run("%distributed start -n 2").status == "ok"
    processes = processes_of(bare_notebook)
    if way == "restart":
        bare_notebook.manager.restart_kernel(now=False)
    elif way == "shutdown":
        bare_notebook.manager.shutdown_kernel()
    else:
        bare_notebook.manager.signal_kernel(9)
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []


def test_start_shows_stages_and_ends_with_the_table(bare_notebook):
    cell = bare_notebook.run("%distributed start -n 2")
    texts = [display["text/plain"] for display in cell.displays]
    assert texts[0].startswith("starting 2 ranks with")
    assert any("verifying the process group" in text for text in texts)
    assert "started in" in texts[-1]
    assert bare_notebook.run("%load_ext nbdist").status == "ok"
    assert bare_notebook.run("%%distributed\nprint(1)").out == "[0-1] 1\n"


def test_failed_start_names_stage_and_leaves_nothing(bare_notebook):
    cell = bare_notebook.run("%distributed start -n 2 --mpi /no/such/mpirun")
    assert (cell.status, cell.ename) == ("error", "StartError")
    assert "no MPI launcher: looked for `/no/such/mpirun`" in cell.evalue
    again = bare_notebook.run("%distributed start -n 2")
    assert (again.evalue, again.status) == ("", "ok")


def test_start_works_where_the_host_name_does_not_resolve(tmp_path):
    script = tmp_path / "start.py"
    script.write_text(
        "from nbdist import World\nwith World.start(2) as w:\n"
        "    print(w.run('import torch, torch.distributed as d; x = torch.ones(1); "
        "d.all_reduce(x); print(int(x))').text)\n"
    )
    command = f"hostname no-such-host.invalid && exec {sys.executable} -W ignore {script}"
    unshare = ["unshare", "--uts", "sh", "-c", command]
    if subprocess.run([*unshare[:2], "true"], check=False, capture_output=True).returncode:
        pytest.skip("unshare --uts needs privileges that this user has not")
    done = subprocess.run(unshare, capture_output=True, text=True, timeout=90, check=False)
    assert done.stdout == "{0: '2\\n', 1: '2\\n'}\n", done.stderr
