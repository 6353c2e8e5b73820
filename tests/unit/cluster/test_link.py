"""The client's link outlives a peer that dies, whatever is done at that moment."""

from __future__ import annotations

import json
import threading

import pytest
import zmq

from nbdist.cluster.link import WorldLink
from nbdist.messages import RankInfo, StatusQuery, Unhandled, to_wire

SECONDS = 10


class FakeRank:
    """The socket of a rank, answered by hand."""

    def __init__(self, context, keys) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.curve_server = True
        self.socket.curve_publickey, self.socket.curve_secretkey = keys
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"

    def hear(self) -> bytes:
        """Wait for a message; return who sent it."""
        assert self.socket.poll(SECONDS * 1000), "nothing came"
        client, _ = self.socket.recv_multipart()
        return client


@pytest.fixture
def ranks(tmp_path):
    """A link and the two ranks that it has reached."""
    keys = zmq.curve_keypair()
    (tmp_path / "keys.json").write_text(json.dumps({"public": keys[0].decode()}))
    with zmq.Context() as context:
        fakes = [FakeRank(context, keys) for _ in range(2)]
        link = WorldLink(tmp_path)
        for rank, fake in enumerate(fakes):
            link.connect(rank, fake.endpoint)
            link.post(rank, StatusQuery(query_id="hello"))
        clients = [fake.hear() for fake in fakes]
        yield link, fakes, clients
        link.close()
        for fake in fakes:
            fake.socket.close(0)


def test_handler_that_fails_at_a_loss_neither_hides_it_from_others_nor_ends_the_link(ranks):
    link, fakes, clients = ranks
    told, heard = threading.Event(), threading.Event()

    def fails(_rank, _event):
        raise KeyError("a handler's fault")

    link.subscribe(Unhandled, fails)
    link.subscribe(Unhandled, lambda rank, event: rank == 1 and told.set())
    link.subscribe(RankInfo, lambda *_: heard.set())
    fakes[1].socket.close(0)

    assert told.wait(SECONDS)
    assert link.lost_ranks == {1}
    info = {"rank": 0, "world_size": 2, "local_rank": 0, "host": "here", "pid": 1, "device": "cpu"}
    fakes[0].socket.send_multipart([clients[0], to_wire(RankInfo(**info, query_id="q"))])
    assert heard.wait(SECONDS)


def test_message_to_a_peer_whose_loss_is_not_noticed_yet_holds_up_nothing(ranks):
    link, fakes, _ = ranks
    seen, sent = threading.Event(), threading.Event()

    def send_too_late() -> None:
        fakes[1].socket.close(0)
        if link._monitors[1].poll(SECONDS * 1000):
            seen.set()
        link._send(1, to_wire(StatusQuery(query_id="late")))
        sent.set()

    link._call(send_too_late)

    assert sent.wait(SECONDS * 2)
    assert seen.is_set()
    link.post(0, StatusQuery(query_id="next"))
    assert fakes[0].hear()
