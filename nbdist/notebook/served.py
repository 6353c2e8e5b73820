"""`%distributed serve` and `unload`: words, tables and the HTTP servers beside them (client)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nbdist.cluster.world import World
from nbdist.errors import ServeError
from nbdist.messages import ModelServed, ModelsUnloaded
from nbdist.notebook.tables import say
from nbdist.serve.http import HttpServer, check_installed, serve_http
from nbdist.serve.order import ENGINES, ServeOrder

__all__ = ["add_serve_arguments", "add_unload_arguments", "close_servers", "serve", "unload"]

_HEADINGS = (
    "model", "rank", "version", "engine", "weights", "cache", "context", "running", "waiting",
    "state",
)  # fmt: skip
_servers: dict[str, HttpServer] = {}


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser of `%distributed serve` its arguments."""
    parser.add_argument(
        "what", nargs="?", metavar="PATH_OR_NAME",
        help="a Hugging Face directory, or with --tokenizer a model's name on the ranks; "
        "without it: list what is served",
    )  # fmt: skip
    parser.add_argument("--tokenizer", metavar="NAME", help="the tokenizer's name on the ranks")
    parser.add_argument("--replicas", type=int, metavar="N", help="default: all ranks serve")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="ranks a replica; default 1")
    parser.add_argument(
        "--share", action="store_true", help="no copy: the weights that are trained themselves"
    )
    parser.add_argument("--name", default="default", help="what requests ask for")
    parser.add_argument("--engine", choices=ENGINES, default="auto", help="default: auto")
    parser.add_argument("--weight-bits", type=int, choices=(8, 4), help="round linear weights")
    parser.add_argument("--speculation", choices=["ngram"], help="guess tokens ahead")
    parser.add_argument("--max-batch", type=int, default=8, metavar="N", help="default: 8")
    parser.add_argument("--http", action="store_true", help="answer OpenAI's clients as well")


def add_unload_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser of `%distributed unload` its arguments."""
    parser.add_argument("name", nargs="?", help="default: all that is served")
    parser.add_argument("--now", action="store_true", help="cancel what runs; else it finishes")


def serve(world: World, arguments: argparse.Namespace, run: Callable[[str, range], None]) -> None:
    """Serve what was asked for and say what to type next; without a model, list what is served.

    Args:
        world: whose ranks serve.
        arguments: the command's.
        run: runs a cell on ranks and shows what they write.
    """
    if arguments.what is None:
        say(table(world.served()) or "nothing is served; `%distributed serve --help`")
        return
    order = ServeOrder(
        what=arguments.what,
        tokenizer=arguments.tokenizer,
        name=arguments.name,
        replicas=arguments.replicas,
        tp=arguments.tp,
        share=arguments.share,
        engine=arguments.engine,
        weight_bits=arguments.weight_bits,
        max_batch=arguments.max_batch,
        speculation=arguments.speculation,
    ).checked(world.num_ranks)
    if arguments.http:
        check_installed()
    run(order.cell(), range(order.num_ranks))
    say(table([one for one in world.served() if one.model == order.name]))
    say(_next_steps(order.name))
    if arguments.http:
        _close_all([order.name])
        template = _chat_template(Path(order.what)) if order.is_directory else None
        server = _servers[order.name] = serve_http(world, order.name, chat_template=template)
        say(f"HTTP: OpenAI(base_url={server.url!r}, api_key={server.token!r})")


def unload(world: World, arguments: argparse.Namespace) -> None:
    """Unload a model or all, and say what memory that gave back."""
    names = [arguments.name] if arguments.name else list(_servers)
    try:
        unloaded = world.unload(arguments.name, now=arguments.now)
    except ServeError:  # nobody serves it: its server has nothing to do either
        _close_all(names)
        raise
    _close_all(names)  # not before: its clients' requests are among those that finish
    say(freed(unloaded))


def close_servers() -> None:
    """End all HTTP servers; their world is about to end."""
    _close_all(list(_servers))


def table(served: list[ModelServed]) -> str:
    """Return what is served as text, a line a replica; empty when nothing is."""
    if not served:
        return ""
    rows = [_HEADINGS, *map(_row, served)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def freed(unloaded: dict[int, ModelsUnloaded]) -> str:
    """Return in words what was unloaded where, and the memory before and after."""
    lines = []
    for rank, answer in unloaded.items():
        names = ", ".join(sorted(answer.models))
        memory = [f"resident {_change(answer.host_bytes)}"]
        if any(answer.device_bytes):
            memory.append(f"GPU {_change(answer.device_bytes)}")
        lines.append(f"rank {rank}: {names} unloaded; {', '.join(memory)}")
    return "\n".join(lines)


def _row(one: ModelServed) -> tuple[str, ...]:
    stats = one.stats
    cache = f"{_megabytes(stats.paged_bytes)} of {_megabytes(stats.capacity_bytes)}"
    return (
        one.model,
        str(one.rank),
        str(one.version),
        one.engine,
        _megabytes(one.weights_bytes),
        cache if stats.capacity_bytes else "-",
        str(one.context_length),
        str(stats.num_running),
        str(stats.num_waiting),
        one.state,
    )


def _next_steps(name: str) -> str:
    given = "" if name == "default" else f", model={name!r}"
    panel = "" if name == "default" else f"model={name!r}"
    return (
        f'ask it: nbdist.generate("Once"{given}), nbdist.GenerateWidget({panel}); '
        f"end it: %distributed unload {name}"
    )


def _chat_template(directory: Path) -> str | None:
    """Return the template of a directory's chats, from either file that may hold it."""
    alone, config = directory / "chat_template.jinja", directory / "tokenizer_config.json"
    if alone.is_file():
        return alone.read_text(encoding="utf-8")
    told: Any = None
    if config.is_file():
        told = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
    return told if isinstance(told, str) else None


def _close_all(names: list[str]) -> None:
    for name in names:
        if (server := _servers.pop(name, None)) is not None:
            server.stop()


def _change(pair: tuple[int, ...]) -> str:
    before, after = pair
    return f"{before / 1e6:,.0f} MB -> {after / 1e6:,.0f} MB"


def _megabytes(number: int) -> str:
    return f"{number / 1e6:,.1f} MB"
