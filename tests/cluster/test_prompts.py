"""Ranks ask through a notebook: prompts, the debugger, post-mortem, and a stop at a prompt."""

from __future__ import annotations

import re
import time

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def notes(cell):
    return [data["text/plain"] for data in cell.displays]


def test_prompt_names_its_rank_and_a_note_says_who_asks(notebook):
    sent = notebook.send("%%distributed\nname = input('name? ') if rank == 1 else 'nobody'\nname")
    assert notebook.wait_for_prompt() == ("[rank 1] name? ", False)
    notebook.type("somebody")
    cell = notebook.wait(sent)
    assert cell.status == "ok"
    assert cell.out == "[0] 'nobody'\n[1] 'somebody'\n"
    assert "Rank 1 asks. The other ranks go on until they need its part." in notes(cell)


def test_secret_and_end_of_input_reach_the_rank(notebook):
    source = (
        "%%distributed -r 0\nimport getpass\nprint(getpass.getpass('key: '))\n"
        "try: input()\nexcept EOFError: print('ended')"
    )
    sent = notebook.send(source)
    assert notebook.wait_for_prompt() == ("[rank 0] key: ", True)
    notebook.type("s3")
    assert notebook.wait_for_prompt() == ("[rank 0] ", False)
    notebook.type("\x04")
    assert notebook.wait(sent).out == "[0] s3\n[0] ended\n"


def test_ranks_that_ask_at_once_are_asked_one_after_another(notebook):
    sent = notebook.send("%%distributed\nprint(rank, input('a '), input('b '))")
    seen = []
    for number in range(4):
        prompt, _ = notebook.wait_for_prompt()
        seen.append(prompt)
        notebook.type(str(number))
    first = int(seen[0][6])
    assert seen == [f"[rank {rank}] {name} " for rank in (first, 1 - first) for name in "ab"]
    cell = notebook.wait(sent)
    assert sorted(cell.out.splitlines()) == sorted(
        [f"[{first}] {first} 0 1", f"[{1 - first}] {1 - first} 2 3"]
    )
    assert "Rank 0-1 was answered." in notes(cell)


def test_breakpoint_on_one_rank_holds_a_collective_of_all(notebook):
    source = (
        "%%distributed\nimport torch, torch.distributed as dist\nx = torch.ones(1)\n"
        "if rank == 0:\n    breakpoint()\ndist.all_reduce(x)\nprint(x.item())"
    )
    sent = notebook.send(source)
    assert notebook.wait_for_prompt() == ("[rank 0] ipdb> ", False)
    notebook.type("p x")
    assert notebook.wait_for_prompt() == ("[rank 0] ipdb> ", False)
    notebook.type("c")
    cell = notebook.wait(sent)
    assert cell.status == "ok"
    assert "[0] tensor([1.])\n" in COLOURS.sub("", cell.out)
    assert cell.out.endswith("[0-1] 2.0\n")


def test_post_mortem_looks_at_the_rank_that_failed_first(notebook):
    failed = notebook.run(
        "%%distributed\nimport time\n"
        "def halve(x):\n    half = x / 0\n    return half\n"
        "halve(41) if rank == 1 else time.sleep(60)"
    )
    assert failed.ename == "RemoteCellError"
    for command in ("%distributed debug", "%distributed debug -r 1", "%distributed debug 1"):
        sent = notebook.send(command)
        assert notebook.wait_for_prompt() == ("[rank 1] ipdb> ", False)
        notebook.type("p x + 1")
        assert notebook.wait_for_prompt() == ("[rank 1] ipdb> ", False)
        notebook.type("q")
        cell = notebook.wait(sent)
        assert cell.status == "ok"
        assert "half = x / 0" in COLOURS.sub("", cell.out)
        assert cell.out.endswith("[1] 42\n")
    stopped = notebook.run("%distributed debug -r 0")
    assert "rank 0 keeps no failed cell" in stopped.evalue
    assert "look at rank 1 (ZeroDivisionError) instead" in stopped.evalue


def test_post_mortem_without_a_failure_says_what_to_run(notebook):
    notebook.run("%%distributed\n1")
    cell = notebook.run("%distributed debug")
    assert cell.ename == "NbdistError"
    assert "no rank keeps a failed cell" in cell.evalue
    assert "run the failing cell again first" in cell.evalue
    notebook.run("%%distributed -r 0\n1 / 0")
    cell = notebook.run("%distributed debug -r 1")
    assert "rank 1 keeps no failed cell" in cell.evalue
    assert "look at rank 0 (ZeroDivisionError) instead" in cell.evalue
    assert "this world has ranks 0 to 1" in notebook.run("%distributed debug 7").err


def test_front_end_without_input_gets_an_error_and_no_hang(notebook):
    sent = notebook.send("%%distributed -r 1\ninput('name? ')", allow_stdin=False)
    cell = notebook.wait(sent)
    assert cell.ename == "RemoteCellError"
    assert "StdinNotImplementedError: input('name? ') was called on rank 1" in cell.evalue
    cell = notebook.wait(notebook.send("%distributed debug", allow_stdin=False))
    assert "this front end takes no input" in cell.evalue


def test_stop_at_a_prompt_ends_the_cell_and_the_next_one_runs(notebook):
    for source in ("%%distributed\ninput('x')", "%%distributed -r 1\nbreakpoint()\nx = 1\nx = 2"):
        sent = notebook.send(source)
        notebook.wait_for_prompt()
        began = time.monotonic()
        notebook.manager.interrupt_kernel()
        cell = notebook.wait(sent)
        assert (cell.status, cell.ename) == ("error", "KeyboardInterrupt")
        assert time.monotonic() - began < 4
        assert notebook.run("%%distributed\nprint('on')").out == "[0-1] on\n"
