"""The HTTP server, asked by OpenAI's own client over a socket."""

from __future__ import annotations

import json
import threading

import httpx
import openai
import pytest

from nbdist.errors import ServeError
from nbdist.messages import CancelRequest, GenerateRequest, ModelServed, ServeQuery, TokenEvent
from nbdist.serve import serve, serve_http
from nbdist.serve.chat import renderer
from nbdist.serve.runner import Runner

GREEDY = {"model": "default", "temperature": 0.0, "max_tokens": 12}


@pytest.fixture
def server(model, tokenizer, ranks):
    replicas = [serve(model, tokenizer, port=port) for port in ranks.ports]
    made = serve_http(ranks)
    yield made
    made.stop()
    for replica in replicas:
        replica.stop()


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url, api_key=server.token, max_retries=0) as made:
        yield made


class FakeReplica:
    """A rank that serves and answers only when told."""

    def __init__(self, port) -> None:
        self.port = port
        self.asked, self.cancelled = threading.Event(), threading.Event()
        self.requests: list[GenerateRequest] = []
        served = ModelServed(
            rank=port.rank, model="default", version=1, max_batch=1, context_length=64
        )
        port.on_message(ServeQuery, lambda _: port.emit(served))
        port.on_message(GenerateRequest, self._take)
        port.on_message(CancelRequest, self._cancel)

    def _take(self, request) -> None:
        self.requests.append(request)
        self.asked.set()

    def _cancel(self, request) -> None:
        self.answer(1, "", "cancelled", request_id=request.request_id)
        self.cancelled.set()

    def answer(self, index, text, finish_reason=None, *, request_id="") -> None:
        self.port.emit(
            TokenEvent(
                request_id=request_id or self.requests[0].request_id,
                rank=0,
                index=index,
                text=text,
                finish_reason=finish_reason,
            )
        )


@pytest.fixture
def fake(one_rank):
    return FakeReplica(one_rank.ports[0])


@pytest.fixture
def fake_server(fake, one_rank):
    made = serve_http(one_rank)
    yield made
    made.stop()


def headers(server) -> dict[str, str]:
    return {"Authorization": f"Bearer {server.token}"}


def test_completion_through_openai_client_equals_the_model_alone(client, greedy):
    answer = client.completions.create(prompt=["the quick", "fox"], **GREEDY)

    texts = [choice.text for choice in answer.choices]
    assert texts == [greedy.text("the quick", 12), greedy.text("fox", 12)]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage.completion_tokens == 24


def test_streamed_completion_joins_to_the_whole_with_usage_last(client, greedy):
    events = list(
        client.completions.create(
            prompt="the quick", stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )

    *pieces, last = events
    assert "".join(e.choices[0].text for e in pieces) == greedy.text("the quick", 12)
    assert [e.choices[0].finish_reason for e in pieces][-2:] == [None, "length"]
    assert last.usage.completion_tokens == 12


def test_chat_renders_its_turns_and_streams(client, greedy):
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "fox?"}]
    whole = client.chat.completions.create(messages=turns, **GREEDY)
    stream = client.chat.completions.create(messages=turns, stream=True, **GREEDY)

    wanted = greedy.text("system: be brief\nuser: fox?\nassistant:", 12)
    assert whole.choices[0].message.content == wanted
    assert "".join(event.choices[0].delta.content for event in stream) == wanted


def test_several_choices_of_a_seed_differ_and_repeat(client):
    asked = {**GREEDY, "temperature": 1.5, "n": 3, "seed": 5, "prompt": "the quick"}
    first, again = (client.completions.create(**asked) for _ in range(2))

    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in again.choices]
    assert len(set(texts)) > 1


def test_logprobs_of_chat_and_completion_name_their_tokens(client):
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": "fox"}], logprobs=True, top_logprobs=2, **GREEDY
    )
    plain = client.completions.create(prompt="fox", logprobs=1, **GREEDY)

    entries = chat.choices[0].logprobs.content
    assert len(entries) == 12
    assert all(e.top_logprobs[0].logprob == e.logprob for e in entries)
    seen = plain.choices[0].logprobs
    assert len(seen.tokens) == len(seen.token_logprobs) == 12
    assert [next(iter(top.values())) for top in seen.top_logprobs] == seen.token_logprobs


def test_models_lists_what_is_served_and_others_are_not_found(client):
    assert [one.id for one in client.models.list()] == ["default"]
    with pytest.raises(openai.NotFoundError, match="ask for 'default'"):
        client.completions.create(**{**GREEDY, "model": "gpt"}, prompt="fox")


def test_client_without_the_token_is_refused_and_health_is_open(server):
    root = server.url.removesuffix("/v1")
    with (
        openai.OpenAI(base_url=server.url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError, match=r"server\.token"),
    ):
        stranger.models.list()

    assert httpx.get(f"{root}/metrics").status_code == 401
    assert httpx.get(f"{root}/health").json() == {"status": "ok", "ranks": [0, 1]}


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ({"top_p": 7.0}, "top_p=7.0"),
        ({"prompt": ""}, "0 tokens"),
        ({"extra_body": {"best_of": 3}}, "best_of"),
        ({"max_tokens": 0}, "max_new_tokens=0"),
    ],
)
def test_bad_request_is_told_apart_and_its_neighbours_are_served(client, greedy, field, text):
    with pytest.raises(openai.BadRequestError, match=text):
        client.completions.create(**{**GREEDY, "prompt": "fox", **field})

    assert client.completions.create(prompt="fox", **GREEDY).choices[0].text == greedy.text(
        "fox", 12
    )


def test_text_in_many_scripts_arrives_whole(client, greedy):
    prompt = "Zażółć 👋🏽 日本"
    stream = client.completions.create(prompt=prompt, stream=True, **{**GREEDY, "max_tokens": 40})

    assert "".join(event.choices[0].text for event in stream) == greedy.text(prompt, 40)


def test_metrics_count_requests_tokens_and_cache(client, server):
    client.completions.create(prompt="fox", **GREEDY)

    text = httpx.get(server.url.replace("/v1", "/metrics"), headers=headers(server)).text

    assert 'nbdist_requests_total{finish_reason="length"} 1.0' in text
    assert "nbdist_tokens_total 12.0" in text
    assert 'nbdist_cache_capacity_bytes{rank="0"}' in text


def test_stream_that_nobody_reads_on_ends_its_request(fake, fake_server):
    body = {**GREEDY, "prompt": "fox", "stream": True}

    def answer() -> None:
        assert fake.asked.wait(20)
        fake.answer(1, "piece")

    answerer = threading.Thread(target=answer)
    answerer.start()
    with httpx.stream(
        "POST", f"{fake_server.url}/completions", json=body, headers=headers(fake_server)
    ) as stream:
        next(stream.iter_lines())
    answerer.join(20)

    assert fake.cancelled.wait(20)


def test_client_that_waits_no_longer_ends_its_request(fake, fake_server):
    body = {**GREEDY, "prompt": "fox"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{fake_server.url}/completions",
            json=body,
            headers=headers(fake_server),
            timeout=httpx.Timeout(20, read=0.5),
        )

    assert fake.asked.is_set()
    assert fake.cancelled.wait(20)


def ask_in_thread(server, **more) -> tuple[threading.Thread, list[httpx.Response]]:
    """Send a completion beside the test; the list has its answer at the end."""
    made: list[httpx.Response] = []
    body = {**GREEDY, "prompt": "fox", **more}

    def ask() -> None:
        made.append(
            httpx.post(f"{server.url}/completions", json=body, headers=headers(server), timeout=30)
        )

    thread = threading.Thread(target=ask)
    thread.start()
    return thread, made


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("ending", "wanted"),
    [
        ("timeout", (504, "timeout_error", None)),
        ("overloaded", (429, "rate_limit_error", "1")),
        ("cancelled", (503, "server_error", None)),
        ("replica_lost", (503, "server_error", None)),
        ("error", (400, "invalid_request_error", None)),
    ],
)
def test_ending_of_a_rank_becomes_its_status(fake, fake_server, stream, ending, wanted):
    thread, made = ask_in_thread(fake_server, stream=stream)
    assert fake.asked.wait(20)
    fake.answer(0, "", ending)
    thread.join(20)

    [answer] = made
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], answer.headers.get("retry-after")) == wanted
    assert f"ended by `{ending}`" in error["message"]


def test_ending_after_some_tokens_keeps_no_text_and_is_not_the_clients_fault(fake, fake_server):
    thread, made = ask_in_thread(fake_server)
    assert fake.asked.wait(20)
    fake.answer(1, "some")
    fake.answer(1, "", "error")
    thread.join(20)

    assert (made[0].status_code, made[0].json()["error"]["type"]) == (503, "server_error")


def test_ending_in_the_middle_of_a_stream_is_its_last_event(fake, fake_server):
    body = {**GREEDY, "prompt": "fox", "stream": True}
    first = threading.Thread(target=lambda: fake.asked.wait(20) and fake.answer(1, "some"))
    first.start()
    url = f"{fake_server.url}/completions"
    with httpx.stream("POST", url, json=body, headers=headers(fake_server)) as stream:
        lines = filter(None, stream.iter_lines())
        assert '"some"' in next(lines)
        fake.answer(1, "", "timeout")
        *_, last, done = lines

    first.join(20)
    assert stream.status_code == 200  # sent with the first token
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "timeout_error"
    assert done == "data: [DONE]"


def test_client_gone_in_the_middle_ends_its_row_within_a_step(
    model, tokenizer, one_rank, monkeypatch
):
    allowed, cancelled = threading.Semaphore(0), threading.Event()
    forward = Runner.forward

    def counted(runner, chunks):
        if threading.current_thread().name.startswith("nbdist-serve"):
            assert allowed.acquire(timeout=20), "a step was wanted that nobody allowed"
        return forward(runner, chunks)

    monkeypatch.setattr(Runner, "forward", counted)
    port = one_rank.ports[0]
    replica = serve(model, tokenizer, port=port)
    before = replica.stats().num_steps  # those of the probe
    cancel = port.handlers[CancelRequest]
    port.on_message(CancelRequest, lambda m: (cancel(m), cancelled.set()))
    server = serve_http(one_rank, token=None)
    allowed.release(2)  # the prompt and its first token, and one more
    body = {**GREEDY, "max_tokens": 80, "prompt": "fox", "stream": True}

    with httpx.stream("POST", f"{server.url}/completions", json=body, timeout=30) as stream:
        next(stream.iter_lines())
    assert cancelled.wait(20)
    allowed.release()  # the step that the engine waits for; it gets no other
    server._router.wait_for_fewer(1)

    stats = replica.stats()
    assert (stats.num_running, stats.num_waiting, stats.paged_bytes) == (0, 0, 0)
    assert stats.num_steps == before + 3
    server.stop()
    replica.stop()


def test_burst_beyond_the_queue_gets_429_and_when_to_come_back(fake, one_rank):
    server = serve_http(one_rank, token=None)
    router = server._router
    router._roster.books._max_waiting = 0
    first = threading.Thread(
        target=httpx.post,
        args=(f"{server.url}/completions",),
        kwargs={"json": {**GREEDY, "prompt": "fox"}, "timeout": 30},
    )
    first.start()
    assert fake.asked.wait(20)

    refused = httpx.post(f"{server.url}/completions", json={**GREEDY, "prompt": "fox"})
    fake.answer(1, "x", "length")
    first.join(20)
    server.stop()

    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    assert "max_waiting=0" in refused.json()["error"]["message"]


def test_health_is_down_when_no_replica_is_left(model, tokenizer, one_rank):
    replica = serve(model, tokenizer, port=one_rank.ports[0])
    server = serve_http(one_rank)
    replica.stop()

    answer = httpx.get(server.url.replace("/v1", "/health"))
    asked = httpx.post(
        f"{server.url}/completions", json={**GREEDY, "prompt": "fox"}, headers=headers(server)
    )
    server.stop()

    assert (answer.status_code, answer.json()["status"]) == (503, "down")
    assert asked.status_code == 503
    assert "run `serve(model, tokenizer)`" in asked.json()["error"]["message"]


def test_health_is_down_when_the_engine_has_failed(model, tokenizer, one_rank, monkeypatch):
    replica = serve(model, tokenizer, port=one_rank.ports[0])
    server = serve_http(one_rank, token=None)

    def fail(_):
        raise OSError("the disk is gone")

    monkeypatch.setattr("nbdist.serve.batcher.Batcher.step", fail)
    asked = httpx.post(f"{server.url}/completions", json={**GREEDY, "prompt": "fox"}, timeout=30)
    replica._thread.join(20)
    health = httpx.get(server.url.replace("/v1", "/health"))
    server.stop()

    assert "the disk is gone" in asked.json()["error"]["message"]
    assert (health.status_code, health.json()["status"]) == (503, "down")


def test_server_listens_on_loopback_on_a_free_port_and_gives_it_back(server):
    assert server.url.startswith("http://127.0.0.1:")
    assert "running" in repr(server)
    server.stop()

    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url)
    assert "stopped" in repr(server)


def test_serve_http_without_a_served_model_opens_no_port(one_rank):
    with pytest.raises(ServeError, match="no model named 'default'"):
        serve_http(one_rank)


def test_renderer_takes_a_template_or_a_function_and_runs_it_in_a_sandbox():
    turns = [{"role": "user", "content": "hi"}]

    assert renderer("{{ messages[0].content }}!")(turns) == "hi!"
    assert renderer(lambda given: given[0]["role"])(turns) == "user"
    with pytest.raises(Exception, match="unsafe"):
        renderer("{{ messages.__class__.__mro__ }}")(turns)
