"""The panel's kernel side, with a router that answers when told."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import ClassVar

import pytest

from nbdist.errors import NoWorldError, Overloaded, ServeError
from nbdist.messages import (
    CancelRequest,
    EngineStats,
    GenerateRequest,
    ModelServed,
    Sampling,
    ServeQuery,
    TokenEvent,
)
from nbdist.notebook.widgets.cards import Slip, note_places
from nbdist.notebook.widgets.coalesce import Coalescer
from nbdist.notebook.widgets.generate import GenerateWidget
from nbdist.serve.generation import Generation
from nbdist.serve.loopback import LoopbackRanks
from nbdist.testing import ManualClock

DEADLINE = 10


class FakeRouter:
    """Takes prompts and keeps them running until the test answers."""

    def __init__(self) -> None:
        self.sent: list[Generation] = []
        self.sampling: list[dict] = []
        self.cancelled: list[str] = []
        self.error: Exception | None = None
        self.arrived = threading.Semaphore(0)

    def submit(self, prompt: str, **sampling) -> Generation:
        self.sampling.append(sampling)
        try:
            if self.error is not None:
                raise self.error
            request_id = f"g{len(self.sent)}"
            made = Generation(
                request_id, prompt, Sampling(), cancel=lambda g: self.cancelled.append(g.prompt)
            )
            made.place(0)
            self.sent.append(made)
            return made
        finally:
            self.arrived.release()

    def answer(self, number: int, index: int, text: str, finish_reason=None, detail="") -> None:
        self.sent[number].apply(
            TokenEvent(
                request_id="",
                rank=0,
                index=index,
                text=text,
                finish_reason=finish_reason,
                detail=detail,
                batch_size=2,
            )
        )


class FakePage:
    """What the browser's half would know: cards put together from messages, as generate.js does."""

    def __init__(self, widget: GenerateWidget, monkeypatch) -> None:
        self.cards: dict[str, dict] = {}
        self.messages: list[dict] = []
        self.changed = threading.Condition()
        self._widget = widget
        monkeypatch.setattr("ipywidgets.Widget.send", lambda _, content: self._receive(content))

    def _receive(self, content: dict) -> None:
        with self.changed:
            self.messages.append(content)
            if content["kind"] == "keep":
                self.cards = {key: self.cards[key] for key in content["ids"]}
            for update in content.get("cards", ()):
                old = self.cards.get(update["id"], {"text": ""})
                if update["start"]:
                    assert update["start"] == len(old["text"]), "a delta does not fit the text"
                    self.cards[update["id"]] = {**update, "text": old["text"] + update["text"]}
                else:
                    self.cards[update["id"]] = update
            self.changed.notify_all()

    def click(self, kind: str, **content) -> None:
        self._widget._handle_custom_msg({"kind": kind, **content}, [])

    def send(self, *prompts: str, **sampling) -> None:
        requests = [{"id": f"id-{prompt}", "prompt": prompt} for prompt in prompts]
        self.click("send", requests=requests, sampling=sampling)

    def wait(self, prompt: str, **wanted) -> dict:
        def there() -> bool:
            card = self.cards.get(f"id-{prompt}", {})
            return all(card.get(key) == value for key, value in wanted.items())

        with self.changed:
            assert self.changed.wait_for(there, DEADLINE), f"{wanted} not in {self.cards}"
            return self.cards[f"id-{prompt}"]


@pytest.fixture
def router():
    return FakeRouter()


@pytest.fixture
def widget(router):
    return GenerateWidget(router)


@pytest.fixture
def page(widget, monkeypatch):
    return FakePage(widget, monkeypatch)


def arrive(router: FakeRouter, number: int = 1) -> None:
    for _ in range(number):
        assert router.arrived.acquire(timeout=DEADLINE), "no prompt reached the router"


def test_panel_with_two_prompts_streams_both_into_their_cards(router, page, widget):
    page.send("one", "two", max_new_tokens=5, temperature=0.0, top_k=3, top_p=0.5, seed=1)
    arrive(router, 2)
    router.answer(0, 1, "a")
    router.answer(1, 1, "x")
    router.answer(0, 2, "b", "stop")

    one = page.wait("one", state="stop")
    two = page.wait("two", state="running")
    assert (one["text"], one["num_tokens"], one["rank"], one["number"]) == ("ab", 2, 0, 1)
    assert (two["text"], two["batch_size"], two["number"]) == ("x", 2, 2)
    assert one["first_token_seconds"] is not None
    assert router.sampling[0] == {
        "max_new_tokens": 5,
        "temperature": 0.0,
        "top_k": 3,
        "top_p": 0.5,
        "seed": 1,
    }
    assert [card["prompt"] for card in widget.cards] == ["one"]


def test_panel_stop_of_one_request_leaves_the_other(router, page):
    page.send("one", "two")
    arrive(router, 2)
    page.wait("one", rank=0)

    page.click("stop", id="id-one")

    assert router.cancelled == ["one"]


def test_panel_stop_all_and_late_texts_end_as_stopped(router, page):
    page.send("one", "two")
    arrive(router, 2)
    page.wait("two", rank=0)
    page.click("stop", id=None)
    router.answer(0, 1, "a", "cancelled")

    assert router.cancelled == ["one", "two"]
    assert page.wait("one", state="cancelled")["text"] == "a"


def test_panel_stop_before_the_router_is_found_never_sends(page, widget, monkeypatch):
    asked, found = threading.Event(), threading.Event()

    def find_router():
        asked.set()
        assert found.wait(DEADLINE)
        raise ServeError("not needed any more")

    monkeypatch.setattr(widget, "_find_router", find_router)
    page.send("one", "two")
    assert asked.wait(DEADLINE)
    page.click("stop", id="id-two")
    assert page.wait("two", state="cancelled")
    found.set()

    assert page.wait("one", state="error")["detail"] == "not needed any more"


@pytest.mark.parametrize(
    "error",
    [ValueError("top_p=7 is not in range"), Overloaded("full", depth=2, limit=2), KeyError("x")],
)
def test_panel_with_a_refused_prompt_shows_why_on_its_card(router, page, error):
    router.error = error
    page.send("one")

    card = page.wait("one", state="error")

    assert str(error) in card["detail"]


def test_panel_clear_takes_finished_cards_and_keeps_running_ones(router, page, widget):
    page.send("one", "two")
    arrive(router, 2)
    router.answer(0, 1, "a", "length")
    page.wait("one", state="length")
    page.wait("two", rank=0)

    page.click("clear")

    assert list(page.cards) == ["id-two"]
    assert widget.cards == []


def test_panel_shown_again_gets_the_whole_text_of_running_cards(router, page):
    page.send("one")
    arrive(router)
    router.answer(0, 1, "abc")
    page.wait("one", text="abc")
    page.cards.clear()

    page.click("hello")
    router.answer(0, 2, "d", "stop")

    assert page.wait("one", state="stop")["text"] == "abcd"


def test_panel_with_a_malformed_message_goes_on(router, page, widget):
    widget._handle_custom_msg("not a message", [])
    page.click("unknown")
    page.click("send", requests=None, sampling="hot")
    page.send("one")

    arrive(router)
    assert router.sent[0].prompt == "one"


def test_panel_with_a_fast_stream_sends_few_messages(router, page):
    page.send("one")
    arrive(router)
    page.wait("one", rank=0)
    before = len(page.messages)
    for index in range(1, 501):
        router.answer(0, index, "x", "stop" if index == 500 else None)

    assert page.wait("one", state="stop")["text"] == "x" * 500
    # 500 events in far less than a second; at 20 a second that is a handful
    assert len(page.messages) - before < 30


def test_widget_submit_from_python_makes_a_card_and_returns_the_generation(router, page, widget):
    generation = widget.submit("one", temperature=0.1)
    router.answer(0, 1, "a", "stop")

    assert generation is router.sent[0]
    assert generation.result(DEADLINE) == "a"
    assert router.sampling[0]["temperature"] == 0.1
    assert router.sampling[0]["max_new_tokens"] == 64
    assert "[1] stop, 1 tokens, rank 0\nonea" in repr(widget)


def test_widget_submit_that_is_refused_raises_and_shows_it(router, widget, page):
    router.error = Overloaded("2 wait", depth=2, limit=2)

    with pytest.raises(Overloaded):
        widget.submit("one")

    assert "[1] error\none\n2 wait" in repr(widget)


def test_widget_with_an_unknown_control_lists_the_controls():
    with pytest.raises(ValueError, match=r"no control \['topk'\]; it has \['max_new_tokens'"):
        GenerateWidget(FakeRouter(), topk=3)


def test_widget_without_a_world_says_so_on_the_card(page, widget, monkeypatch):
    def nothing():
        raise NoWorldError("no world is running; type `%distributed start`")

    monkeypatch.setitem(sys.modules["nbdist"].__dict__, "current_world", nothing)
    widget._source = None
    page.send("one")

    assert "%distributed start" in page.wait("one", state="error")["detail"]


def test_widget_over_ranks_finds_what_they_serve_and_again_after_they_are_lost(monkeypatch):
    with LoopbackRanks(2) as ranks:
        requests, arrived = [], threading.Semaphore(0)
        port = ranks.ports[1]

        def serve() -> None:
            served = ModelServed(rank=1, model="m", version=1, max_batch=2, context_length=9)
            port.on_message(ServeQuery, lambda _: port.emit(served))
            port.on_message(CancelRequest, lambda _: None)
            port.on_message(GenerateRequest, lambda r: (requests.append(r), arrived.release()))

        widget = GenerateWidget(ranks, "m")
        page = FakePage(widget, monkeypatch)
        page.send("early")
        assert "no model named 'm'" in page.wait("early", state="error")["detail"]
        serve()
        page.send("one")
        assert arrived.acquire(timeout=DEADLINE)
        port.handlers.clear()
        page.send("two")
        assert "no model named 'm'" in page.wait("two", state="replica_lost")["detail"]
        serve()
        page.send("three")
        assert arrived.acquire(timeout=DEADLINE)

        assert [r.prompt for r in requests] == ["one", "three"]
        assert widget.serving == "rank 1"


def test_widget_comm_lets_the_front_end_choose_the_shell(router):
    import comm
    from ipykernel.comm.comm import BaseComm

    assert hasattr(BaseComm, "_reply_subshell_for"), "ipykernel has changed: look again"
    created = comm.create_comm
    comm.create_comm = BaseComm
    try:
        widget = GenerateWidget(router)
    finally:
        comm.create_comm = created

    assert widget.comm._reply_subshell_for({}, "subshell of the page") == "subshell of the page"


def test_importing_the_panel_brings_no_torch():
    code = "import sys, nbdist.notebook.widgets.generate; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_panel_shows_how_many_wait_before_a_request_until_it_begins(router, page):
    page.send("one", "two", "three")
    arrive(router, 3)
    page.wait("one", detail="next")
    page.wait("three", detail="2 before it")

    router.answer(0, 1, "a")

    page.wait("one", state="running", detail="")
    page.wait("two", detail="next, in about 1 s")
    router.answer(0, 1, "", "stop")
    router.answer(1, 1, "b")
    page.wait("three", state="queued", detail="next, in about 1 s")


def test_places_of_a_queue_go_by_rank_and_by_the_pace_so_far():
    def made(number: int, rank: int, num_tokens: int = 0) -> Slip:
        generation = Generation(f"{number}", "p", Sampling(), cancel=lambda _: None)
        generation.place(rank)
        if num_tokens:
            event = TokenEvent(request_id="", rank=rank, index=num_tokens, text="a")
            generation.apply(event)
        return Slip(f"{number}", number, "p", generation, sent_at=100.0)

    slips = [made(0, 0, 3), made(1, 1, 3), made(2, 0), made(3, 1), made(4, 0), made(5, 0)]
    note_places(slips, 106.0)  # two have begun in six seconds

    assert [slip.place for slip in slips] == [
        *("", "", "next, in about 3 s", "next, in about 3 s"),
        *("1 before it, in about 6 s", "2 before it, in about 9 s"),
    ]


class FakeEngines(FakeRouter):
    """A router whose engines hold more at each look, until nobody serves."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = threading.Semaphore(0)
        self.num_looks = 0
        self.gone = False

    def stats(self) -> dict[int, EngineStats]:
        self.num_looks += 1
        self.looks.release()
        if self.gone:
            raise ServeError("nobody serves")
        return {0: EngineStats(used_bytes=512 * self.num_looks, capacity_bytes=2048)}


def test_panel_shows_the_cache_while_a_request_runs_and_looks_no_more_after_it(monkeypatch):
    router = FakeEngines()
    widget = GenerateWidget(router)
    monkeypatch.setattr(widget._cache_line, "_interval_seconds", 0.01)
    shown = []
    widget.observe(lambda change: shown.append(change["new"]), "memory")

    widget.submit("one")
    thread = widget._cache_line._thread
    assert all(router.looks.acquire(timeout=DEADLINE) for _ in range(3))
    router.answer(0, 1, "a", "stop")
    thread.join(DEADLINE)

    assert not thread.is_alive()
    assert shown[:2] == [
        "cache: 512 B in use; paged 0 B of 2 KiB, 0% wasted; contiguous 0 B, 0% wasted",
        "cache: 1 KiB in use; paged 0 B of 2 KiB, 0% wasted; contiguous 0 B, 0% wasted",
    ]
    assert shown[-1] in repr(widget)
    router.gone = True
    widget.submit("two")
    again = widget._cache_line._thread
    router.answer(1, 1, "a", "stop")
    again.join(DEADLINE)
    assert widget.memory == ""


class FakeTimer:
    made: ClassVar[list[FakeTimer]] = []

    def __init__(self, seconds, call) -> None:
        self.seconds, self.call, self.daemon = seconds, call, False
        self.made.append(self)

    def start(self) -> None:
        pass


def test_coalescer_flushes_the_first_change_at_once_and_the_rest_together():
    clock, flushed = ManualClock(), []
    FakeTimer.made.clear()
    coalescer = Coalescer(
        lambda: flushed.append(clock()), interval_seconds=0.5, clock=clock, timer=FakeTimer
    )
    for _ in range(5):
        coalescer.mark()
        clock.advance(0.1)
    assert flushed == [0.0]
    assert [timer.seconds for timer in FakeTimer.made] == [0.4]

    FakeTimer.made[0].call()
    coalescer.mark()

    assert flushed == [0.0, 0.5]
    assert len(FakeTimer.made) == 2
