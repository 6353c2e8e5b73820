"""The log of collective calls: what a peer reads of it."""

import threading

import pytest

from nbdist.rank.calls import ANY, NUM_SLOTS, Call, CallLog

GROUP = 2**63 + 12


def a_call(number=1, **changes):
    fields = {"group": GROUP, "number": number, "op": 3, "dtype": 5, "numel": 24}
    return Call.of(**(fields | changes))


@pytest.fixture
def pair(tmp_path):
    """The log of a rank, and what a peer has opened of it."""
    mine = CallLog(tmp_path / "0.calls", writable=True)
    seen = CallLog(tmp_path / "0.calls")
    yield mine, seen
    seen.close()
    mine.close()


def test_call_is_read_back_whole_by_a_peer(pair):
    mine, seen = pair
    written = a_call(reduction=2, root=7, cell=12, line=34, shape=(2, 3, 4), numel=2**40)
    mine.write(written)
    assert seen.read(GROUP, 1) == written


def test_shape_of_more_than_four_dimensions_keeps_the_first_four(pair):
    mine, seen = pair
    mine.write(a_call(shape=(1, 2, 3, 4, 5)))
    assert seen.read(GROUP, 1).shape == (1, 2, 3, 4)


def test_call_that_was_not_made_reads_as_none(pair):
    mine, seen = pair
    mine.write(a_call(number=4))
    assert seen.read(GROUP, 5) is None
    assert seen.read(GROUP + 1, 4) is None


def test_slot_taken_by_a_later_call_no_longer_shows_the_earlier_one(pair):
    mine, seen = pair
    mine.write(a_call(number=1))
    mine.write(a_call(number=1 + NUM_SLOTS))
    assert seen.read(GROUP, 1) is None
    assert seen.read(GROUP, 1 + NUM_SLOTS) == a_call(number=1 + NUM_SLOTS)


def test_only_a_call_that_is_there_and_does_not_match_differs(pair):
    mine, seen = pair
    assert not seen.differs(a_call())
    mine.write(a_call(root=0))
    assert not seen.differs(a_call(root=0))
    assert not seen.differs(a_call(root=0, numel=ANY))
    assert not seen.differs(a_call(number=2))
    assert seen.differs(a_call(root=0, op=4))


def test_log_that_is_opened_again_for_writing_is_empty(tmp_path, pair):
    mine, seen = pair
    mine.write(a_call())
    CallLog(tmp_path / "0.calls", writable=True).close()
    assert seen.read(GROUP, 1) is None


def test_record_that_is_being_written_is_never_read_half(pair):
    mine, seen = pair
    done = threading.Event()
    versions = [a_call(numel=1, shape=(1, 1, 1, 1)), a_call(numel=9, shape=(9, 9, 9, 9))]

    def write():
        while not done.is_set():
            for version in versions:
                mine.write(version)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        found = [seen.read(GROUP, 1) for _ in range(2000)]
    finally:
        done.set()
        writer.join()
    assert all(call in versions for call in found if call is not None)


@pytest.mark.parametrize(
    "change", [{"op": 4}, {"dtype": 6}, {"numel": 25}, {"root": 1}, {"reduction": 1}]
)
def test_calls_that_differ_do_not_match(change):
    known = {"root": 0, "reduction": 0}
    assert not a_call(**known).matches(a_call(**(known | change)))


@pytest.mark.parametrize("change", [{"numel": ANY}, {"root": ANY}, {"dtype": 0}, {"shape": (4, 6)}])
def test_calls_that_differ_in_what_need_not_be_equal_match(change):
    assert a_call(root=0).matches(a_call(**({"root": 0} | change)))
    assert a_call(**({"root": 0} | change)).matches(a_call(root=0))
