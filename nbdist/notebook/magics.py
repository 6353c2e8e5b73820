"""`%distributed` and `%%distributed` (client)."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Generator
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class

from nbdist.cluster.source import check_ranks
from nbdist.cluster.world import World
from nbdist.errors import CellInterrupted, CellSyntaxError, NbdistError
from nbdist.messages import Message
from nbdist.notebook import served
from nbdist.notebook.arguments import COMMANDS, cell_parser, line_parser, parse
from nbdist.notebook.asking import Prompts, prompt_of
from nbdist.notebook.auto import AutoMode
from nbdist.notebook.complete import RankNames
from nbdist.notebook.healed import incident_list, replace_ranks
from nbdist.notebook.late import LateOutput
from nbdist.notebook.logs import read_log
from nbdist.notebook.outlet import MAX_CHARS
from nbdist.notebook.postmortem import SOURCE, choose_rank
from nbdist.notebook.render import CellView
from nbdist.notebook.resized import resize
from nbdist.notebook.session import current_world, set_world
from nbdist.notebook.shelf import ACTIONS, shelf_cell
from nbdist.notebook.tables import StageDisplay, say, show, show_status
from nbdist.notebook.values import pull, push

__all__ = ["DistributedMagics", "load", "unload"]


@magics_class
class DistributedMagics(Magics):
    """The magics of a notebook; the world itself is `nbdist.current_world()`."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell=shell)
        self._ip = shell
        self.auto_mode = AutoMode(shell)
        self.rank_names = RankNames(shell, self.auto_mode)
        self._late = LateOutput(self._publish)
        self._cell_parser = cell_parser()
        self._line_parser = line_parser()
        self._defaults = self._cell_parser.parse_args([])

    @line_cell_magic
    def distributed(self, line: str, cell: str | None = None) -> None:
        """Run a cell on the ranks, or a command: `%distributed --help`."""
        if cell is not None:
            self._run_cell(line, cell)
            return
        arguments = parse(self._line_parser, line)
        if arguments is None:
            return
        if arguments.command is None:
            self._line_parser.print_help()
            return
        command = getattr(self, f"_{arguments.command}")
        try:
            command(arguments)
        except ValueError as error:
            raise UsageError(str(error)) from None

    def _run_cell(self, line: str, cell: str) -> None:
        options = parse(self._cell_parser, line) if line.strip() else self._defaults
        if options is None:
            return
        world = current_world()
        try:
            ranks = check_ranks(options.ranks, world.num_ranks)
            self._show_cell(world, cell, ranks, options.timeout, quiet=options.quiet)
        except SyntaxError as error:
            raise CellSyntaxError(error) from None
        except ValueError as error:
            raise UsageError(f"%%distributed: {error}") from None

    def _show_cell(
        self,
        world: World,
        source: str,
        ranks: tuple[int, ...],
        timeout_seconds: float | None = None,
        *,
        quiet: bool = False,
    ) -> None:
        prompt = prompt_of(self._ip)
        stream = world.stream(
            source,
            ranks,
            timeout_seconds,
            execution_count=self._ip.execution_count,
            text_limit=2 * MAX_CHARS // len(ranks),
            can_ask=prompt is not None,
        )
        view = CellView(ranks, self._publish, quiet=quiet, live=hasattr(self._ip, "kernel"))
        if not quiet:
            world.on_late_event(self._late.take)
            view.on_first_event = self._late.remember
        prompts = Prompts(prompt, world.post, view, is_alone=len(ranks) == 1) if prompt else None
        failed = True
        try:
            _drive(stream, view, prompts)
            failed = False
        finally:
            view.finish(failed=failed)

    def _publish(self, action: str, content: dict[str, Any], label: str) -> None:
        publisher = self._ip.display_pub
        if action == "clear_output":
            publisher.clear_output(wait=content.get("wait", False))
            return
        update = action == "update_display_data"
        if not update and label:
            say(label)
        publisher.publish(
            content["data"],
            content.get("metadata", {}),
            transient=content.get("transient", {}),
            update=update,
        )

    def _start(self, arguments: argparse.Namespace) -> None:
        try:
            running = current_world()
        except NbdistError:
            running = None
        if running is not None:
            raise UsageError(
                f"%distributed start: world {running.world_id} with {running.num_ranks} ranks runs "
                "already; use it, or type `%distributed stop` first (its variables go with it)"
            )
        display = StageDisplay(self._ip)
        world = World.start(
            arguments.num_ranks,
            on_stage=display.stage,
            keep=arguments.keep,
            timeout_seconds=arguments.timeout,
            mpi_command=arguments.mpi,
            threads_per_rank=arguments.threads,
            spares=arguments.spares,
        )
        set_world(world)
        display.done(world)

    def _attach(self, arguments: argparse.Namespace) -> None:
        world = World.attach(arguments.world_id)
        set_world(world)
        show_status(self._ip, world)
        if world.lost_ranks:
            lost = ", ".join(map(str, sorted(world.lost_ranks)))
            say(f"rank {lost} has no process; `%distributed heal` starts one, the others go on")

    def _status(self, _arguments: argparse.Namespace) -> None:
        show_status(self._ip, current_world())

    def _stop(self, _arguments: argparse.Namespace) -> None:
        world = current_world()
        self.auto_mode.is_on = False
        served.close_servers()
        world.stop()
        set_world(None)
        say(f"world {world.world_id} has ended")

    def _heal(self, _arguments: argparse.Namespace) -> None:
        world = current_world()
        replace_ranks(self._ip, world, world.heal)

    def _restart(self, arguments: argparse.Namespace) -> None:
        world = current_world()
        replace_ranks(self._ip, world, lambda tell: world.restart(arguments.ranks, tell))

    def _incidents(self, _arguments: argparse.Namespace) -> None:
        say(incident_list(current_world().incidents))

    def _resize(self, arguments: argparse.Namespace) -> None:
        resize(self._ip, current_world(), arguments.num_ranks)

    def _interrupt(self, _arguments: argparse.Namespace) -> None:
        current_world().interrupt()

    def _debug(self, arguments: argparse.Namespace) -> None:
        world = current_world()
        wanted = arguments.rank if arguments.option is None else arguments.option
        if wanted is not None:
            check_ranks((wanted,), world.num_ranks)
        if prompt_of(self._ip) is None:
            raise NbdistError(
                "`%distributed debug` asks for commands, but this front end takes no input: "
                "run it in JupyterLab, a notebook or a terminal"
            )
        self._show_cell(world, SOURCE, (choose_rank(world, wanted),))

    def _push(self, arguments: argparse.Namespace) -> None:
        push(self._ip.user_ns, current_world(), arguments)

    def _pull(self, arguments: argparse.Namespace) -> None:
        pull(self._ip.user_ns, current_world(), arguments)

    def _who(self, arguments: argparse.Namespace) -> None:
        show(self._ip, current_world().who(arguments.pattern).bundle())

    def _logs(self, arguments: argparse.Namespace) -> None:
        world = current_world()
        for rank in check_ranks(arguments.ranks, world.num_ranks):
            say(read_log(Path(world.record.directory), rank, arguments.tail))

    def _checkpoints(self, arguments: argparse.Namespace) -> None:
        world = current_world()
        source, on_all = shelf_cell(arguments)
        first = min(set(range(world.num_ranks)) - world.lost_ranks, default=0)
        self._show_cell(world, source, tuple(range(world.num_ranks)) if on_all else (first,))

    def _serve(self, arguments: argparse.Namespace) -> None:
        world = current_world()
        served.serve(world, arguments, lambda cell, on: self._show_cell(world, cell, tuple(on)))

    def _unload(self, arguments: argparse.Namespace) -> None:
        served.unload(current_world(), arguments)

    def _auto(self, arguments: argparse.Namespace) -> None:
        if arguments.state == "on":
            current_world()
        self.auto_mode.is_on = arguments.state == "on"


def _drive(
    stream: Generator[Message | None, None, None], view: CellView, prompts: Prompts | None
) -> None:
    """Show a cell's events; an interrupt while one is shown reaches the ranks as well."""
    pending: KeyboardInterrupt | None = None
    while True:
        try:
            event = next(stream) if pending is None else stream.throw(pending)
            pending = None
            view.take(event)
            if prompts is not None:
                prompts.take(event)
        except StopIteration:
            return
        except KeyboardInterrupt as interrupt:
            if inspect.getgeneratorstate(stream) == inspect.GEN_CLOSED:
                said = f"; {interrupt}" if str(interrupt) else ""
                raise CellInterrupted(
                    f"stopped on the ranks; their variables are kept{said}"
                ) from None
            pending = interrupt
            if prompts is not None:
                prompts.stop()


def _complete(_completer: Any, event: Any) -> list[str]:
    """Complete the commands of `%distributed`."""
    words = event.line.split()
    typed = len(words) - bool(event.symbol)
    if typed <= 1:
        return list(COMMANDS)
    return list(ACTIONS) if typed == 2 and words[1] == "checkpoints" else []


def load(shell: Any) -> None:
    """Register the magics with a shell; loading again keeps the world."""
    unload_magics(shell)
    shell.register_magics(DistributedMagics(shell))
    shell.set_hook("complete_command", _complete, str_key="%distributed")


def unload_magics(shell: Any) -> None:
    """Take what `load` added out of the shell."""
    present = shell.magics_manager.registry.pop("DistributedMagics", None)
    if present is not None:
        present.auto_mode.remove(shell)
        present.rank_names.remove()


def unload(shell: Any) -> None:
    """Stop the world, if any, and take the magics out."""
    unload_magics(shell)
    try:
        world = current_world()
    except NbdistError:
        return
    served.close_servers()
    world.stop()
    set_world(None)
