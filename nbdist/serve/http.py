"""The HTTP server: a thread beside the notebook that answers OpenAI's clients (client).

Needs the extra `serve`: `pip install nbdist[serve]`.
"""

from __future__ import annotations

import secrets
import socket
import threading
from typing import TYPE_CHECKING, Any

from nbdist.errors import ServeError
from nbdist.serve.chat import renderer
from nbdist.serve.router import Router

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.serve.chat import ChatTemplate
    from nbdist.serve.ports import RanksPort

__all__ = ["HttpServer", "check_installed", "serve_http"]

_START_SECONDS = 30.0


def serve_http(
    ranks: RanksPort,
    model: str = "default",
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = "",
    chat_template: ChatTemplate | None = None,
) -> HttpServer:
    """Answer OpenAI's clients with a model that ranks serve.

    Args:
        ranks: the world, or another way to the ranks.
        model: the name given to `serve`.
        host: where to listen; other machines reach it only when another address is given.
        port: 0 takes a free one.
        token: what clients must send; by default a fresh one, None lets everybody in.
        chat_template: a tokenizer's `chat_template`, or a function from turns to a prompt.

    Returns:
        The running server; `server.stop()` ends it. Requests that run then are cancelled.

    Raises:
        ServeError: no rank serves the model, or the packages of the extra are not installed.
        OSError: the port is taken.
    """
    check_installed()
    import uvicorn

    from nbdist.serve.http_app import make_app

    render = renderer(chat_template)
    router = Router(ranks, model)
    chosen = secrets.token_urlsafe(24) if token == "" else token
    try:
        app = make_app(router, token=chosen, render=render)
        listener = socket.create_server((host, port))
    except BaseException:
        router.close()
        raise
    config = uvicorn.Config(app, log_level="warning", lifespan="off", access_log=False)
    return HttpServer(config, listener, router, chosen)


def check_installed() -> None:
    """See that the packages of the extra are there.

    Raises:
        ServeError: one is not.
    """
    try:
        import fastapi
        import prometheus_client
        import uvicorn
    except ImportError as error:
        raise ServeError(
            f"`serve_http` needs {error.name}, which is not installed; run "
            "`pip install nbdist[serve]`"
        ) from error
    assert fastapi, prometheus_client
    assert uvicorn


class HttpServer:
    """A running server; made by `serve_http`.

    Attributes:
        url: for a client's `base_url`.
        token: for a client's `api_key`; None when none is needed.
    """

    def __init__(
        self, config: Any, listener: socket.socket, router: Router, token: str | None
    ) -> None:
        host, port = listener.getsockname()[:2]
        self.url = f"http://{host}:{port}/v1"
        self.token = token
        self._router = router
        self._listener = listener
        started = threading.Event()
        self._server = _make_server(config, started.set)
        self._thread = threading.Thread(
            target=self._server.run,
            kwargs={"sockets": [listener]},
            name=f"nbdist-http-{port}",
            daemon=True,
        )
        self._thread.start()
        if not started.wait(_START_SECONDS):
            self.stop()
            raise ServeError(f"the server at {self.url} did not start in {_START_SECONDS:g} s")

    def __repr__(self) -> str:
        state = "running" if self._thread.is_alive() else "stopped"
        return f"HttpServer(url={self.url!r}, model={self._router.model!r}, {state})"

    def stop(self, *, timeout_seconds: float = 10.0) -> None:
        """Cancel what runs, close all connections, and free the port."""
        self._router.close()
        self._server.should_exit = True
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            self._server.force_exit = True
            self._thread.join(timeout_seconds)
        self._listener.close()


def _make_server(config: Any, on_start: Callable[[], None]) -> Any:
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            on_start()

    return Server(config)
