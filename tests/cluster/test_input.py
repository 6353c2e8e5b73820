"""`input`, `getpass`, `breakpoint` and post-mortem on real ranks, answered by this client."""

from __future__ import annotations

import contextlib
import re
import time

import pytest

from nbdist.errors import RemoteCellError
from nbdist.messages import InputRequest, RankStream

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
STOP_SECONDS = 4.0  # a fraction of a second on an idle machine


class Typist:
    """Answers with its lines in order, or by prompt, and remembers what was asked."""

    def __init__(self, *lines, **by_rank):
        self.lines = list(lines)
        self.by_rank = {int(name[1:]): list(lines) for name, lines in by_rank.items()}
        self.asked = []

    def __call__(self, rank, prompt, password):
        self.asked.append((rank, prompt, password))
        return (self.by_rank[rank] if self.by_rank else self.lines).pop(0)

    @property
    def ranks(self):
        return [rank for rank, _, _ in self.asked]


def is_request(event):
    return isinstance(event, InputRequest)


def stop(world, source, when=is_request):
    """Stop a cell at an event; return the seconds to its end and what was printed."""
    stream = world.stream(source, can_ask=True)
    text, began = "", None
    event = None
    while True:
        try:
            if when(event) and began is None:
                began = time.monotonic()
                event = stream.throw(KeyboardInterrupt())
            else:
                event = next(stream)
        except KeyboardInterrupt:
            return time.monotonic() - began, text
        if isinstance(event, RankStream):
            text += event.text


def test_each_rank_gets_its_own_line_and_secret(world):
    typist = Typist(r0=["zero", "s0"], r1=["one", "s1"])
    source = (
        "import getpass\nname = input('name: ')\nsecret = getpass.getpass('key: ')\n"
        "print(name, secret)"
    )
    result = world.run(source, on_input=typist)
    assert result.text == {0: "zero s0\n", 1: "one s1\n"}
    assert sorted(typist.asked) == [
        (0, "key: ", True),
        (0, "name: ", False),
        (1, "key: ", True),
        (1, "name: ", False),
    ]


def test_text_before_a_question_comes_before_it(world):
    text, asked = "", []
    with contextlib.closing(world.stream("print('Q', end='')\ninput()", [1], can_ask=True)) as cell:
        for event in cell:
            if isinstance(event, RankStream):
                text += event.text
            if isinstance(event, InputRequest):
                asked.append(text)
                world.post(event.rank, event.reply("x"))
    assert asked == ["Q"]


def test_standard_input_and_threads_ask_as_well(world):
    source = (
        "import sys, threading\nprint(repr(sys.stdin.readline()))\n"
        "t = threading.Thread(target=lambda: print(input('t? ')))\nt.start(); t.join()"
    )
    typist = Typist("a line", "from a thread")
    assert world.run(source, [0], on_input=typist).text == {0: "'a line\\n'\nfrom a thread\n"}


def test_end_of_input_is_an_eof_error_on_the_rank(world):
    def nothing(rank, prompt, password):
        raise EOFError

    with pytest.raises(
        RemoteCellError, match=r"raised EOFError: input\(\) on rank 1: the input has"
    ):
        world.run("input()", [1], on_input=nothing)


@pytest.mark.parametrize("source", ["input('name: ')", "breakpoint()\nx = 1"])
def test_client_that_cannot_ask_gets_an_error_at_once(world, source):
    with pytest.raises(RemoteCellError) as caught:
        world.run(source, timeout_seconds=60)
    assert caught.value.name == "StdinNotImplementedError"
    assert "was called on rank" in caught.value.value
    assert "nobody can type an answer; set the value as a variable before" in caught.value.value
    assert "`on_input=` to `World.run`" in caught.value.value


def test_child_process_and_apply_cannot_ask(world):
    source = (
        "import os\nread, write = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    try: input()\n"
        "    except BaseException as error: os.write(write, str(error).encode())\n"
        "    os._exit(0)\n"
        "_ = os.wait(); print(os.read(read, 1000).decode())"
    )
    text = world.run(source, [1], on_input=Typist()).text[1]
    assert "on rank 1, in a child process of the rank: nobody can type" in text
    with pytest.raises(RemoteCellError, match="outside of a cell: nobody can type an answer"):
        world.apply(input, ranks=[0])


def test_mistake_in_the_answering_function_stops_the_cell(world):
    with pytest.raises(TypeError, match="returned int: return the line as str"):
        world.run("input()", on_input=lambda *_: 5)
    assert world.run("print('on')").text == {0: "on\n", 1: "on\n"}


def test_debugger_sessions_of_ranks_are_not_mixed(world):
    source = (
        "def double(x):\n    y = 2 * x\n    breakpoint()\n    return y\nprint(double(rank + 1))"
    )
    typist = Typist(r0=["p y", "p x", "c"], r1=["p y", "p x", "c"])
    text = {
        rank: COLOURS.sub("", text)
        for rank, text in world.run(source, on_input=typist).text.items()
    }
    first = typist.ranks[0]
    assert typist.ranks == [first] * 3 + [1 - first] * 3
    assert {prompt for _, prompt, _ in typist.asked} == {"ipdb> "}
    for rank, lines in text.items():
        assert "breakpoint()" in lines
        assert lines.endswith(f"\n{2 * (rank + 1)}\n{rank + 1}\n{2 * (rank + 1)}\n")


def test_rank_at_a_breakpoint_holds_the_others_until_it_goes_on(world):
    source = (
        "import torch, torch.distributed as dist\nx = torch.ones(2) * (rank + 1)\n"
        "if rank == 1:\n    breakpoint()\n"
        "dist.all_reduce(x)\nprint(x.tolist())"
    )
    typist = Typist("p x.tolist()", "x.mul_(10)", "c")
    text = world.run(source, on_input=typist).text
    assert "[2.0, 2.0]" in COLOURS.sub("", text[1])
    assert text[0] == "[21.0, 21.0]\n"  # 1 + 10 * 2: exact in float32
    assert text[1].endswith("[21.0, 21.0]\n")


def test_breakpoint_of_torch_distributed_asks_on_its_rank(world):
    source = "import torch.distributed as dist\ndist.breakpoint(rank=1)\nprint('after')"
    typist = Typist("c")
    text = world.run(source, on_input=typist).text
    assert typist.ranks == [1]
    assert text[0] == "after\n"


def test_debugger_left_by_q_ends_the_cell_and_frees_the_others(world):
    source = "import torch.distributed as dist\nif rank == 0: breakpoint()\ndist.barrier()"
    with pytest.raises(RemoteCellError, match="rank 0 raised BdbQuit: the debugger was left by"):
        world.run(source, on_input=Typist("q"))


def test_python_breakpoint_variable_is_obeyed(world):
    source = (
        "import os\nos.environ['PYTHONBREAKPOINT'] = '0'\nbreakpoint()\n"
        "del os.environ['PYTHONBREAKPOINT']"
    )
    assert world.run(source).text == {0: "", 1: ""}


STOPPED = {
    "input": "input('x')",
    "breakpoint": "breakpoint()\nx = 1\nx = 2",
    "function": "def f():\n    breakpoint()\n    return 1\nf()\nprint('went', 'on')",
    "pdb of the standard library": """
import pdb
plain = next(cls for cls in pdb.Pdb.mro() if cls.__module__ == 'pdb')
plain().set_trace()
x = 1
""",
    "thread": """
import threading
thread = threading.Thread(target=lambda: input('t'))
thread.start()
thread.join()
""",
}


@pytest.mark.parametrize("source", STOPPED.values(), ids=STOPPED)
def test_stop_at_a_prompt_ends_the_cell(world, source):
    seconds, text = stop(world, source)
    assert seconds < STOP_SECONDS
    assert "went on" not in text
    assert world.run("print('next')", on_input=Typist()).text == {0: "next\n", 1: "next\n"}


def test_stop_works_after_the_debugger_has_gone_on(world):
    def is_on(event):
        if is_request(event):
            world.post(event.rank, event.reply("c"))
        return isinstance(event, RankStream) and event.text.endswith("on\n")

    seconds, text = stop(world, "breakpoint()\nprint('on')\nwhile True: pass", is_on)
    assert "breakpoint()" in text
    assert seconds < STOP_SECONDS


WATCHED = """
import weakref
seen = None
class Large: pass
def fail(how):
    large = Large()
    globals()['seen'] = weakref.ref(large)
    me = large, how
    print('in')
    try:
        how()
    except Exception as error:
        raise RuntimeError('boom') from error
def divide(): 1 / 0
"""


def test_traceback_is_kept_for_the_debugger_and_dropped_by_the_next_cell(world):
    world.run(WATCHED, [0])
    with pytest.raises(RemoteCellError, match="RuntimeError: boom"):
        world.run("fail(divide)", [0])
    assert world.status()[0].failure == "RuntimeError"
    typist = Typist("p seen() is large", "q")
    assert "True" in world.run("%debug", [0], on_input=typist).text[0]
    typist = Typist("p type(me)", "exceptions 0", "up", "q")
    assert "tuple" in world.run("%debug", [0], on_input=typist).text[0]
    assert world.run("print(seen())", [0]).text == {0: "None\n"}
    assert world.status()[0].failure == ""


def test_traceback_of_a_coroutine_is_dropped_as_well(world):
    source = WATCHED.replace("def fail(how)", "async def fail(how)")
    world.run(source, [0])
    with pytest.raises(RemoteCellError, match="RuntimeError: boom"):
        world.run("await fail(divide)", [0])
    assert world.run("print(seen() is not None)  # %tb", [0]).text == {0: "True\n"}
    assert world.run("print(seen())", [0]).text == {0: "None\n"}


@pytest.mark.parametrize("how", ["input", "dist.barrier", "(lambda: time.sleep(60))"])
def test_traceback_of_a_stopped_cell_is_dropped_at_once(world, how):
    world.run(WATCHED + "\nimport time, torch.distributed as dist")
    source = f"input() if rank else fail({how})"
    seconds, _ = stop(world, source, lambda event: isinstance(event, RankStream))
    assert seconds < STOP_SECONDS
    assert world.status()[0].failure in ("", "RuntimeError")
    assert world.run("print(type(seen))", [0]).text == {0: "<class 'weakref.ReferenceType'>\n"}
    assert world.run("print(seen())", [0]).text == {0: "None\n"}
