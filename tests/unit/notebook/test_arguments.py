"""The magics' command line answers every mistake with what to type."""

import pytest
from IPython.core.error import UsageError

from nbdist.notebook.arguments import COMMANDS, cell_parser, line_parser, parse
from nbdist.notebook.auto import AutoMode


def test_cell_options_are_read():
    options = parse(cell_parser(), "-r 0,2:4 --timeout 2.5 --quiet")
    assert (options.ranks, options.timeout, options.quiet) == ("0,2:4", 2.5, True)


def test_cell_options_take_a_negative_rank():
    assert parse(cell_parser(), "-r -1").ranks == "-1"


@pytest.mark.parametrize("line", ["--rank 0 --bad", "extra", "--timeout soon", "-r"])
def test_cell_options_with_a_mistake_point_to_help(line):
    with pytest.raises(UsageError, match=r"type `%%distributed --help`"):
        parse(cell_parser(), line)


def test_unbalanced_quote_is_a_usage_error():
    with pytest.raises(UsageError, match="No closing quotation"):
        parse(cell_parser(), "-r '0")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    assert parse(line_parser(), f"{command} --help") is None
    assert f"usage: %distributed {command}" in capsys.readouterr().out


def test_unknown_command_lists_those_that_exist():
    with pytest.raises(UsageError, match=r"invalid choice: 'begin' .*start.*status.*stop"):
        parse(line_parser(), "begin")


class FakeShell:
    def __init__(self):
        self.input_transformers_cleanup = []


@pytest.mark.parametrize(
    "cell", ["%%time\nx", "%distributed stop", "%load_ext nbdist", "?x", "", "\n\n"]
)
def test_auto_mode_leaves_cells_that_say_where_they_run(cell):
    mode = AutoMode(FakeShell())
    mode.is_on = True
    lines = cell.splitlines(keepends=True)
    assert mode(lines) == lines


def test_auto_mode_sends_other_cells_to_the_ranks():
    mode = AutoMode(FakeShell())
    assert mode(["x = 1\n"]) == ["x = 1\n"]
    mode.is_on = True
    assert mode(["x = 1\n"]) == ["%%distributed\n", "x = 1\n"]
    assert mode(["# note\n", "%time x\n"])[0] == "%%distributed\n"


def test_local_header_keeps_a_cell_here_in_any_mode():
    mode = AutoMode(FakeShell())
    for mode.is_on in (True, False):
        assert mode(["%%local\n", "x = 1\n"]) == ["x = 1\n"]
