"""`%distributed checkpoints`: its words and the cell they become."""

import pytest
from IPython.core.error import UsageError

from nbdist.notebook.arguments import line_parser, parse
from nbdist.notebook.shelf import shelf_cell


@pytest.mark.parametrize(
    ("line", "call", "on_all"),
    [
        ("checkpoints", "table(globals(), None)", False),
        ("checkpoints --dir a", "table(globals(), 'a')", False),
        ("checkpoints list --dir 'a b'", "table(globals(), 'a b')", False),
        ("checkpoints --dir a verify", "verify_steps(globals(), 'a', None)", False),
        ("checkpoints verify 20", "verify_steps(globals(), None, 20)", False),
        ("checkpoints restore 20", "restore_step(globals(), None, 20)", True),
        ("checkpoints export --to out", "export_step(globals(), None, None, 'out')", False),
    ],
)
def test_words_become_a_call(line, call, on_all):
    source, everyone = shelf_cell(parse(line_parser(), line))

    assert source.endswith(f".{call})")
    assert everyone == on_all
    compile(source, "cell", "exec")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("checkpoints restore", "required: step"),
        ("checkpoints restore last", "invalid int value: 'last'"),
        ("checkpoints export 3", "required: --to"),
        ("checkpoints remove", "invalid choice: 'remove'"),
    ],
)
def test_wrong_words_are_named(line, text):
    with pytest.raises(UsageError, match=text):
        parse(line_parser(), line)


def test_help_names_the_actions(capsys):
    assert parse(line_parser(), "checkpoints --help") is None
    told = capsys.readouterr().out
    assert all(action in told for action in ("list", "verify", "restore", "export", "--dir"))
