"""Completion and inspection beside a running cell: right names, and no code of the user runs."""

import pytest
import torch

from nbdist.rank import glance


class Touchy:
    """A class whose code must not run."""

    stored = 1

    def __init__(self):
        self.own = [1]

    @property
    def costly(self):
        raise AssertionError("a property ran")

    def __getattr__(self, name):
        raise AssertionError(f"__getattr__({name!r}) ran")

    def __dir__(self):
        raise AssertionError("__dir__ ran")


NAMES = {
    "touchy": Touchy(),
    "net": torch.nn.Sequential(torch.nn.Linear(1, 1)),
    "été": 1,
    "torch": torch,
}


@pytest.mark.parametrize(
    ("source", "matches"),
    [
        ("touchy.", ["touchy.costly", "touchy.own", "touchy.stored"]),
        ("touchy.co", ["touchy.costly"]),
        ("touchy.costly.", []),
        ("touchy.own.app", ["touchy.own.append"]),
        ("net.0", []),
        ("print(net.trai", ["net.train", "net.training"]),
        ("torch.nn.init.eye_", ["torch.nn.init.eye_"]),
        ("ét", ["été"]),
        ("unknown.x", []),
        ("lamb", ["lambda"]),
        ("", []),
    ],
)
def test_completion_reads_names_without_running_code(source, matches):
    reply = glance.complete(NAMES, source, len(source))
    assert reply["matches"] == matches
    assert reply["cursor_end"] == len(source)
    if matches:
        replaced = source[reply["cursor_start"] : reply["cursor_end"]]
        assert all(match.startswith(replaced) for match in matches)


def test_completion_looks_only_at_what_stands_before_the_cursor():
    reply = glance.complete(NAMES, "a = net.trai + 1\nb", 12)
    assert reply["matches"] == ["net.train", "net.training"]
    assert (reply["cursor_start"], reply["cursor_end"]) == (4, 12)


def test_inspection_gives_type_and_docstring():
    text = glance.inspect(NAMES, "x = touchy", 6)["data"]["text/plain"]
    assert text.startswith("Type: Touchy\nDocstring: A class whose code must not run.\n")
    assert not glance.inspect(NAMES, "nothing", 3)["found"]
    assert not glance.inspect(NAMES, "touchy.costly", 10)["found"]
