"""Messages survive the wire, and only known ones are read."""

import json

import pytest

from nbdist import messages
from nbdist.messages import (
    GenerateRequest,
    NameRow,
    NamesAnswer,
    RankStream,
    RunCell,
    Sampling,
    from_wire,
    to_wire,
)


@pytest.mark.parametrize(
    "message",
    [
        NamesAnswer(
            rank=1,
            query_id="q",
            reply={"matches": ["a"], "cursor_start": 0},
            rows=(NameRow(name="x", type_name="Tensor", num_bytes=8, is_sampled=True),),
        ),
        RunCell(cell_id="c", source="print('Zażółć 👋🏽 日本')", ranks=(0, 2)),
        RankStream(rank=1, cell_id="c", seq=3, stream="stdout", text="half \ud83d of a pair\n\0"),
        GenerateRequest(
            request_id="r", model="m", prompt="p", sampling=Sampling(stop=("a", "b"), seed=None)
        ),
    ],
)
def test_message_sent_and_received_is_equal(message):
    assert from_wire(to_wire(message)) == message


def test_wire_of_unknown_kind_is_refused_with_known_kinds():
    with pytest.raises(ValueError, match=r"kind 'exec' is unknown; known kinds: .*'run'"):
        from_wire(json.dumps({"kind": "exec"}).encode())


def test_wire_with_unknown_field_names_it():
    data = json.loads(to_wire(messages.Shutdown()))
    with pytest.raises(ValueError, match=r"Shutdown has no field \['now'\]"):
        from_wire(json.dumps({**data, "now": 1}).encode())


def test_wire_with_missing_field_names_the_message():
    with pytest.raises(ValueError, match="RankStream cannot be built"):
        from_wire(json.dumps({"kind": "stream", "rank": 0}).encode())


def test_topic_is_the_id_of_the_conversation():
    assert messages.topic_of(messages.Interrupt(cell_id="c1")) == "c1"
    assert messages.topic_of(messages.CancelRequest(request_id="r1")) == "r1"
    assert messages.topic_of(messages.Shutdown()) == ""
