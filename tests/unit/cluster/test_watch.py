"""Judging where ranks are: which waits are hopeless, which are worth a note."""

import pytest

from nbdist.cluster import watch as module
from nbdist.cluster.watch import Watch
from nbdist.errors import CollectiveSubsetError
from nbdist.messages import RunCell, Where


class FakeLink:
    """Answers each query at once with what `places` says of the rank."""

    lost_ranks = frozenset()

    def __init__(self):
        self.places = {}

    def listen(self, topic, handler):
        del topic
        self.handler = handler

    def post(self, rank, query):
        place = {"running_cell": "c", **self.places[rank]}
        self.handler(rank, Where(rank=rank, query_id=query.query_id, **place))


IDLE = {"running_cell": "", "counts": {"a": 2}}


def waiting(seconds, number=3):
    return {
        "waits_in": "all_reduce", "waited_seconds": seconds, "group": "a", "number": number,
        "group_ranks": (0, 1), "line": "Cell In[4], line 2",
    }  # fmt: skip


@pytest.fixture
def link(monkeypatch):
    monkeypatch.setattr(module, "FIRST_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)
    monkeypatch.setenv("NBDIST_SILENT_SECONDS", "10")
    return FakeLink()


def watch(link, ranks=(0, 1)):
    return Watch(link, RunCell(cell_id="c", source="", ranks=ranks), 2)


def test_status_tells_where_the_ranks_are_at_most_once_a_second(link, monkeypatch):
    link.places = {0: {"line": "Cell In[4], line 2"}, 1: {"line": "Cell In[3], line 7"}}
    watched = Watch(link, RunCell(cell_id="c", source="", ranks=(0, 1), execution_count=4), 2)
    assert [watched.look() for _ in range(3)] == [None] * 3, "the cell has run for a moment only"
    monkeypatch.setattr(module, "STATUS_SECONDS", 0.0)
    note = watched.look()
    assert note.is_status
    assert note.text == "running 0 s: rank 0: line 2; rank 1: Cell In[3], line 7"
    link.places[1] = link.places[0]
    watched.look()
    assert watched.look().text == "running 0 s: ranks 0, 1: line 2"


def looks(watched, count=5):
    return [note.text for _ in range(count) if (note := watched.look()) is not None]


def test_wait_for_an_idle_rank_that_never_called_raises_and_names_it(link):
    link.places = {0: waiting(3.0), 1: IDLE}
    with pytest.raises(
        CollectiveSubsetError, match="rank 1 runs no cell and never called"
    ) as error:
        looks(watch(link, ranks=(0,)))
    assert error.value.ranks == (1,)


@pytest.mark.parametrize(
    "other",
    [
        {"running_cell": "c"},
        {"running_cell": "another"},
        {"running_cell": "", "counts": {"a": 3}},
    ],
)
def test_wait_for_a_rank_that_runs_a_cell_or_has_called_is_left_alone(link, other):
    link.places = {0: waiting(3.0), 1: other}
    assert looks(watch(link)) == []


def test_short_wait_for_an_idle_rank_is_left_alone(link):
    link.places = {0: waiting(1.0), 1: IDLE}
    assert looks(watch(link, ranks=(0,))) == []


def test_new_wait_is_not_taken_for_the_one_before(link):
    watched = watch(link, ranks=(0,))
    for number in range(3, 9):
        link.places = {0: waiting(3.0, number), 1: IDLE}
        assert watched.look() is None


def test_note_says_which_rank_waits_for_input_and_nothing_is_raised(link):
    asks = {"asks": True, "line": "Cell In[4], line 1", "counts": {"a": 2}}
    link.places = {0: waiting(11.0), 1: asks}
    [note] = looks(watch(link))
    assert note.splitlines()[2] == "  rank 1: waits for your input, Cell In[4], line 1"


def test_long_wait_gives_one_note_that_places_every_rank_until_it_ends(link):
    watched = watch(link)
    link.places = {0: waiting(12.0), 1: {"line": "Cell In[4], line 1"}}
    (note,) = looks(watched)
    assert "rank 0: in all_reduce, for 12 s, Cell In[4], line 2" in note
    assert "rank 1: not in a collective, Cell In[4], line 1" in note
    link.places = {0: {}, 1: {}}
    assert looks(watched) == ["The ranks go on."]
