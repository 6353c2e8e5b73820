"""OpenAI's interface over a router: completions, chats, models, health, metrics (client)."""

from __future__ import annotations

import asyncio
import json
import secrets
from typing import TYPE_CHECKING, Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse

from nbdist.errors import Overloaded, ServeError
from nbdist.serve.http_metrics import Metrics
from nbdist.serve.openai_answers import Form, error_body
from nbdist.serve.openai_types import ChatRequest, CompletionRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from nbdist.serve.chat import Turns
    from nbdist.serve.generation import Generation
    from nbdist.serve.router import Router

__all__ = ["make_app"]

_BAD_ENDINGS = ("cancelled", "timeout", "overloaded", "replica_lost", "error")


def make_app(router: Router, *, token: str | None, render: Callable[[Turns], str]) -> FastAPI:
    """Return the application.

    Args:
        router: takes the requests.
        token: what `Authorization: Bearer` must carry; None lets everybody in.
        render: makes a prompt of a chat.
    """
    app = FastAPI(openapi_url=None, dependencies=[Depends(_checks(token))])
    desk = _Desk(router)
    _explain_errors(app)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await desk.answer(body, body.prompts(), request, chat=False)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        turns = [turn.model_dump() for turn in body.messages]
        return await desk.answer(body, [render(turns)], request, chat=True)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        one = {"id": router.model, "object": "model", "created": 0, "owned_by": "nbdist"}
        return {"object": "list", "data": [one]}

    @app.get("/health")
    async def health() -> Response:
        try:
            await asyncio.to_thread(router.refresh)
        except ServeError as error:
            return JSONResponse({"status": "down", "detail": str(error)}, status_code=503)
        return JSONResponse({"status": "ok", "ranks": list(router.replicas)})

    @app.get("/metrics")
    async def metrics() -> Response:
        try:
            stats = await asyncio.to_thread(router.stats)
        except ServeError:
            stats = {}
        return Response(desk.metrics.text(stats), media_type="text/plain; version=0.0.4")

    return app


class _Desk:
    """Takes requests to the router and brings the answers back."""

    def __init__(self, router: Router) -> None:
        self.metrics = Metrics()
        self._router = router

    async def answer(
        self,
        body: CompletionRequest | ChatRequest,
        prompts: list[str],
        request: Request,
        *,
        chat: bool,
    ) -> Response:
        """Answer a request, whole or as a stream; its end is the end of its generations."""
        if body.model != self._router.model:
            text = f"model {body.model!r} is not served; ask for {self._router.model!r}"
            return _error(404, text, "not_found_error")
        generations = self._submitted(body, prompts)
        form = Form(body.model, generations[0].request_id, chat=chat)
        # a stream's status is sent first, so what ranks refuse must be known before it
        await _until(_has_begun if body.stream else _has_ended, generations, request)
        for generation in generations:
            if generation.finish_reason in _BAD_ENDINGS:
                for other in generations:
                    other.cancel()
                return _failed(generation)
        if not body.stream:
            return JSONResponse(form.whole(generations))
        usage = body.stream_options is not None and body.stream_options.include_usage
        events = self._events(form, generations, usage=usage)
        return StreamingResponse(events, media_type="text/event-stream")

    def _submitted(
        self, body: CompletionRequest | ChatRequest, prompts: list[str]
    ) -> list[Generation]:
        replicas = self._router.replicas.values()
        context = min((served.context_length for served in replicas), default=1)
        sampling = body.sampling(context)
        made: list[Generation] = []
        try:
            for prompt in prompts:
                for number in range(body.n):
                    seed = None if body.seed is None else body.seed + number
                    generation = self._router.submit(prompt, **{**sampling, "seed": seed})
                    generation.on_event(self._count)
                    made.append(generation)
        except BaseException as error:
            for generation in made:
                generation.cancel()
            if isinstance(error, Overloaded):
                self.metrics.refused()
            raise
        return made

    def _count(self, generation: Generation) -> None:
        if generation.finish_reason is not None:
            self.metrics.ended(generation)

    async def _events(
        self, form: Form, generations: list[Generation], *, usage: bool
    ) -> AsyncIterator[str]:
        """Yield the events of a stream; when nobody reads on, its requests are cancelled."""
        try:
            async for index, text in _pieces(generations):
                generation = generations[index]
                if text is not None:
                    seen = generation.take_logprobs()
                    yield _event(form.piece(index, text, None, seen))
                elif generation.finish_reason in _BAD_ENDINGS:
                    yield _event(error_body(_why(generation), _meaning(generation)[1]))
                else:
                    yield _event(form.piece(index, "", generation.finish_reason, []))
            if usage:
                yield _event(form.usage(generations))
            yield "data: [DONE]\n\n"
        finally:
            for generation in generations:
                generation.cancel()


async def _pieces(generations: list[Generation]) -> AsyncIterator[tuple[int, str | None]]:
    """Yield new text of any generation as it comes, and None once for each that has ended."""
    changed = _wakes(generations)
    seen = [0] * len(generations)
    left = set(range(len(generations)))
    while left:
        changed.clear()
        for index in sorted(left):
            ended = generations[index].finish_reason is not None  # first: no text comes after it
            text = generations[index].text
            if len(text) > seen[index]:
                yield index, text[seen[index] :]
                seen[index] = len(text)
            if ended:
                left.discard(index)
                yield index, None
        if left:
            await changed.wait()


def _has_begun(generation: Generation) -> bool:
    return generation.num_tokens > 0 or _has_ended(generation)


def _has_ended(generation: Generation) -> bool:
    return generation.finish_reason is not None


async def _until(
    reached: Callable[[Generation], bool], generations: list[Generation], request: Request
) -> None:
    """Wait until all have reached a state; when the client has gone, cancel."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        for generation in generations:
            generation.cancel()

    watcher = asyncio.create_task(gone())
    changed = _wakes(generations)
    while not all(map(reached, generations)):
        await changed.wait()
        changed.clear()
    watcher.cancel()


def _wakes(generations: list[Generation]) -> asyncio.Event:
    """Return what is set after each event of the generations."""
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def wake(_: Generation) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(changed.set)

    for generation in generations:
        generation.on_event(wake)
    return changed


class _NoTokenError(Exception):
    """A request came without the token."""


def _checks(token: str | None) -> Callable[[Request], None]:
    """Return what refuses requests without the token; health is open to all."""

    def check(request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if token is None or request.url.path == "/health":
            return
        if not secrets.compare_digest(given, f"Bearer {token}".encode()):
            raise _NoTokenError

    return check


def _explain_errors(app: FastAPI) -> None:
    """Give errors the form that clients read."""

    @app.exception_handler(_NoTokenError)
    async def stranger(_: Request, __: _NoTokenError) -> Response:
        text = "no valid token was given; send `Authorization: Bearer` with `server.token`"
        return _error(401, text, "authentication_error")

    @app.exception_handler(Overloaded)
    async def overloaded(_: Request, error: Overloaded) -> Response:
        return _error(429, str(error), "rate_limit_error", {"Retry-After": "1"})

    @app.exception_handler(ServeError)
    async def nobody(_: Request, error: ServeError) -> Response:
        return _error(503, str(error), "server_error")

    @app.exception_handler(ValueError)
    async def refused(_: Request, error: ValueError) -> Response:
        return _error(400, str(error), "invalid_request_error")

    @app.exception_handler(RequestValidationError)
    async def unreadable(_: Request, error: RequestValidationError) -> Response:
        text = "; ".join(f"{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in error.errors())
        return _error(400, text, "invalid_request_error")


def _error(status: int, text: str, kind: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse(error_body(text, kind), status_code=status, headers=headers)


def _failed(generation: Generation) -> Response:
    status, kind = _meaning(generation)
    return _error(status, _why(generation), kind, {"Retry-After": "1"} if status == 429 else None)


def _meaning(generation: Generation) -> tuple[int, str]:
    """Return the status and the kind of error of a bad ending."""
    if generation.finish_reason == "overloaded":
        return 429, "rate_limit_error"
    if generation.finish_reason == "timeout":
        return 504, "timeout_error"
    # what cannot run is refused before its first token; later the fault is ours
    if generation.finish_reason == "error" and not generation.num_tokens:
        return 400, "invalid_request_error"
    return 503, "server_error"


def _why(generation: Generation) -> str:
    return f"the request ended by `{generation.finish_reason}`: {generation.detail}"


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"
