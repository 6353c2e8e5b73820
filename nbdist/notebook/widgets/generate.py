"""The Generate panel: prompts in, streamed answers out, several at once (client)."""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import anywidget
import traitlets

from nbdist.errors import NbdistError, Overloaded, ServeError
from nbdist.notebook.widgets.cacheline import CacheLine
from nbdist.notebook.widgets.cards import Slip, note_places, text_of
from nbdist.notebook.widgets.coalesce import Coalescer
from nbdist.serve.router import Router

if TYPE_CHECKING:
    from nbdist.notebook.widgets.cacheline import HasStats
    from nbdist.serve.generation import Generation
    from nbdist.serve.ports import RanksPort

__all__ = ["GenerateWidget", "Submitter"]

_log = logging.getLogger(__name__)
_HERE = Path(__file__).parent

_CONTROLS = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")


class Submitter(Protocol):
    """What the panel needs of a `Router`."""

    def submit(self, prompt: str, **sampling: Any) -> Generation:
        """Send a prompt; never blocks."""
        ...


class GenerateWidget(anywidget.AnyWidget):
    """A panel to try a model that ranks serve.

    Each request is a card with its text as it comes, its numbers and a stop button; while requests
    run, a line tells what the cache holds, and what a contiguous one would take. Work is done
    on other threads, so a click returns at once and text keeps coming while a cell runs; clicks
    themselves reach an idle kernel always, and a busy one where the front end delivers them on
    subshells (JupyterLab 4.4 and later). Text fallback: `print(widget)`.

    Args:
        source: a `World`, a `Router`, or another way to ranks; None takes the world that is
            current when a prompt is sent, so the panel may be shown before it is started.
        model: the name given to `serve`.
        **sampling: first values of the controls, such as `temperature=0.2`.
    """

    _esm = _HERE / "generate.js"
    _css = _HERE / "generate.css"

    panel_id = traitlets.Unicode(help="The same in all views.").tag(sync=True)
    model = traitlets.Unicode("default").tag(sync=True)
    serving = traitlets.Unicode("").tag(sync=True)
    memory = traitlets.Unicode("").tag(sync=True)
    sampling = traitlets.Dict().tag(sync=True)
    cards = traitlets.List(traitlets.Dict()).tag(sync=True)

    def __init__(
        self,
        source: RanksPort | Submitter | None = None,
        model: str = "default",
        **sampling: Any,
    ) -> None:
        if unknown := sorted(set(sampling) - set(_CONTROLS)):
            raise ValueError(f"the panel has no control {unknown}; it has {list(_CONTROLS)}")
        defaults = {"max_new_tokens": 64, "temperature": 0.8, "top_k": 0, "top_p": 1.0}
        super().__init__(
            panel_id=uuid.uuid4().hex,
            model=model,
            sampling={**defaults, "seed": None, **sampling},
        )
        self._source = source
        self._router: Router | None = None
        self._ranks: RanksPort | None = None
        self._slips: dict[str, Slip] = {}
        self._num_sent = 0
        self._lock = threading.RLock()
        self._router_lock = threading.Lock()
        self._wanted: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._coalescer = Coalescer(self._flush)
        self._cache_line = CacheLine(lambda line: self.set_trait("memory", line), self._is_live)
        self.on_msg(self._on_page)
        self._answer_while_cells_run()

    def __repr__(self) -> str:
        with self._lock:
            cards = [slip.card() for slip in self._slips.values()]
        head = f"GenerateWidget(model={self.model!r}, {len(cards)} requests)"
        lines = [head, *filter(None, [self.memory]), *([text_of(cards)] if cards else [])]
        return "\n".join(lines)

    def submit(self, prompt: str, **sampling: Any) -> Generation:
        """Send a prompt as the Send button does, with a card of its own.

        Args:
            prompt: text to continue.
            **sampling: takes the place of the controls' values.

        Raises:
            ServeError, NoWorldError, ValueError: see `Router.submit`; the card shows it too.
        """
        slip = self._add(uuid.uuid4().hex, prompt)
        try:
            return self._submit(slip, {**self._values(), **sampling})
        except (NbdistError, ValueError) as error:
            self._refuse(slip, str(error))
            raise

    def stop(self, request_id: str | None = None) -> None:
        """End one request, or all that run."""
        with self._lock:
            slips = [s for s in self._slips.values() if request_id in (None, s.id) and not s.ended]
        for slip in slips:
            if slip.generation is not None:
                slip.generation.cancel()
            else:  # not handed over yet; the worker passes it by
                self._settle(slip, "cancelled")

    def clear(self) -> None:
        """Take away the cards of requests that have ended."""
        with self._lock:
            self._slips = {key: slip for key, slip in self._slips.items() if not slip.ended}
            self.cards = []
            super().send({"kind": "keep", "ids": list(self._slips)})

    def _on_page(self, _widget: object, content: object, _buffers: object) -> None:
        """Take a message of the page; runs on the kernel's thread, so it only takes notes."""
        if not isinstance(content, dict):
            return
        kind, request_id = content.get("kind"), content.get("id")
        if kind == "send":
            self._on_send(content)
        elif kind == "stop":
            self.stop(request_id if isinstance(request_id, str) else None)
        elif kind == "clear":
            self.clear()
        elif kind == "hello":
            with self._lock:
                for slip in self._slips.values():
                    slip.num_shown, slip.changed = 0, True
            self._coalescer.mark()

    def _on_send(self, content: dict[str, Any]) -> None:
        sampling = content.get("sampling")
        given = sampling if isinstance(sampling, dict) else {}
        chosen = {**self._values(), **{key: given[key] for key in _CONTROLS if key in given}}
        for request in content.get("requests") or ():
            request_id, prompt = str(request.get("id")), str(request.get("prompt"))
            if request_id not in self._slips:
                self._add(request_id, prompt)
                self._wanted.put((request_id, chosen))
        with self._lock:
            if self._worker is None:
                self._worker = threading.Thread(
                    target=self._work, name="nbdist-generate-widget", daemon=True
                )
                self._worker.start()

    def _work(self) -> None:
        """Hand requests to the router, one by one; finding the router may take seconds."""
        while True:
            request_id, sampling = self._wanted.get()
            slip = self._slips.get(request_id)
            if slip is None or slip.ended:
                continue
            try:
                self._submit(slip, sampling)
            except (NbdistError, ValueError) as error:
                self._refuse(slip, str(error))
            except Exception as error:  # noqa: BLE001 - becomes the card's ending
                _log.exception("a prompt could not be sent")
                self._refuse(slip, f"{type(error).__name__}: {error}")

    def _submit(self, slip: Slip, sampling: dict[str, Any]) -> Generation:
        router = self._find_router()
        try:
            generation = router.submit(slip.prompt, **sampling)
        except Overloaded:
            raise
        except ServeError:  # no replica is left: others may have come since
            if not isinstance(router, Router):
                raise
            router.refresh()
            generation = router.submit(slip.prompt, **sampling)
        with self._lock:
            stopped = slip.ended
            slip.generation = generation
        generation.on_event(lambda _: self._note(slip))
        self._note(slip)
        if hasattr(router, "stats"):
            self._cache_line.watch(cast("HasStats", router))
        if stopped:
            generation.cancel()
        return generation

    def _is_live(self) -> bool:
        with self._lock:
            return any(not slip.ended for slip in self._slips.values())

    def _values(self) -> dict[str, Any]:
        return {name: self.sampling.get(name) for name in _CONTROLS}

    def _find_router(self) -> Submitter:
        with self._router_lock:
            source: Any = self._source
            if source is None:
                import nbdist

                source = nbdist.current_world()
            if hasattr(source, "submit"):
                return cast("Submitter", source)
            ranks: RanksPort = source
            if self._router is None or self._ranks is not ranks:
                router = Router(ranks, self.model)
                if self._router is not None:  # of a world that has been stopped
                    self._router.close()
                self._router, self._ranks = router, ranks
                self.serving = _served_by(list(router.replicas))
            return self._router

    def _add(self, request_id: str, prompt: str) -> Slip:
        with self._lock:
            self._num_sent += 1
            slip = Slip(request_id, self._num_sent, prompt)
            self._slips[request_id] = slip
        self._coalescer.mark()
        return slip

    def _refuse(self, slip: Slip, detail: str) -> None:
        slip.refused = detail
        self._settle(slip, "error")

    def _settle(self, slip: Slip, state: str) -> None:
        with self._lock:
            slip.state = state
        self._note(slip)

    def _note(self, slip: Slip) -> None:
        slip.changed = True
        self._coalescer.mark()

    def _flush(self) -> None:
        """Send what has changed; the finished cards also become state, for a later display."""
        with self._lock:
            note_places(list(self._slips.values()), time.monotonic())
            changed = [slip for slip in self._slips.values() if slip.changed]
            if not changed:
                return
            super().send({"kind": "cards", "cards": [slip.delta() for slip in changed]})
            if any(slip.ended for slip in changed):
                self.cards = [s.card().to_page() for s in self._slips.values() if s.ended]

    def _answer_while_cells_run(self) -> None:
        # ipykernel 7.4 sends a page's message to the shell that made the widget, which is busy
        # while a cell runs; the front end's own choice, a subshell, is free. What runs there only
        # takes locks for a moment and prints nothing.
        if hasattr(self.comm, "_reply_subshell_for"):
            self.comm._reply_subshell_for = lambda _data, default: default


def _served_by(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks))
