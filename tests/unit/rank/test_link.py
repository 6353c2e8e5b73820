"""The control thread of a rank outlives whatever a handler does."""

import zmq

from nbdist.messages import RankInfo, StatusQuery, WhereQuery, from_wire, to_wire
from nbdist.rank.link import RankLink


def test_handler_that_raises_does_not_end_the_control_thread():
    public, secret = zmq.curve_keypair()
    link = RankLink(3, "127.0.0.1", (public, secret))

    def fails(_message):
        raise TypeError("a frame without a line")

    def answers(message):
        info = {"rank": 3, "world_size": 4, "local_rank": 3, "host": "here", "pid": 1}
        link.emit(RankInfo(**info, device="cpu", query_id=message.query_id))

    link.on_message(WhereQuery, fails)
    link.on_message(StatusQuery, answers)
    link.start()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = public
        socket.connect(link.endpoint)
        socket.send(to_wire(WhereQuery(query_id="1")))
        socket.send(to_wire(StatusQuery(query_id="2")))
        assert socket.poll(10_000)
        answer = from_wire(socket.recv())
    assert (answer.query_id, answer.rank) == ("2", 3)
