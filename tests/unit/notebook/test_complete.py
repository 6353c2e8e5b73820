"""Which part of a cell runs on the ranks."""

from types import SimpleNamespace

import pytest

from nbdist.notebook.auto import AutoMode
from nbdist.notebook.complete import split_cell

LOCAL = None


@pytest.mark.parametrize(
    ("code", "auto", "length"),
    [
        ("%%distributed\nx.|", False, 14),
        ("%%distributed -r 0\nx.|", False, 19),
        ("\n  %%distributed\nx.|", False, 17),
        ("%%distributed|\nx", False, LOCAL),
        ("%%distributed|", False, LOCAL),
        ("%%distributed?\nx.|", False, LOCAL),
        ("%%distributed_more\nx.|", False, LOCAL),
        ("x = 1\n%%distributed\nx.|", False, LOCAL),
        ("x.|", False, LOCAL),
        ("x.|", True, 0),
        ("%%distributed\nx.|", True, 14),
        ("%time x.|", True, 0),
        ("%distr|", True, LOCAL),
        ("%time x\nx.|", True, 0),
        ("%%local\nx.|", True, LOCAL),
        ("%%time\nx.|", True, LOCAL),
        ("%distributed who|", True, LOCAL),
        ("|", True, LOCAL),
    ],
)
def test_cell_is_split_where_the_ranks_source_begins(code, auto, length):
    mode = AutoMode(SimpleNamespace(input_transformers_cleanup=[]))
    mode.is_on = auto
    found = split_cell(code.replace("|", ""), code.index("|"), mode)
    assert (found if found is None else found[1]) == length
