"""The debugger on a rank: IPython's, and a stop at its prompt ends the cell (rank)."""

from __future__ import annotations

import pdb  # noqa: T100 - the module that `breakpoint` calls
import sys
from typing import Any, ClassVar

from IPython.core import debugger

from nbdist.rank.asking import Asking

__all__ = ["RankPdb", "install_debugger"]

_OWN = "nbdist.rank."


class RankPdb(debugger.InterruptiblePdb):
    """Ends with KeyboardInterrupt when the cell is stopped at its prompt.

    Attributes:
        asking: knows whether somebody can type commands.
    """

    asking: ClassVar[Asking]
    _stopped = False

    def __init__(self, *args: Any, **settings: Any) -> None:
        # pdb would take SIGINT at `continue`: the executor needs it.
        super().__init__(*args, **{**settings, "nosigint": True})

    def set_trace(self, frame: Any = None, **settings: Any) -> None:
        """Stop at the caller's next line."""
        __tracebackhide__ = True
        self.asking.check("breakpoint()")
        super().set_trace(frame or sys._getframe().f_back, **settings)  # type: ignore[no-untyped-call]

    def get_stack(self, *args: Any, **settings: Any) -> Any:
        """Return the frames and the place to begin at: the last that is not the rank's own."""
        stack, place = super().get_stack(*args, **settings)  # type: ignore[no-untyped-call]
        while place > 0 and stack[place][0].f_globals.get("__name__", "").startswith(_OWN):
            place -= 1
        return stack, place

    def _cmdloop(self) -> None:
        try:
            self.cmdloop()  # type: ignore[no-untyped-call]
        except KeyboardInterrupt:
            self._stopped = True

    def interaction(self, frame: Any, tb_or_exc: Any) -> None:
        """Talk with the user; a stop is passed on, which IPython's debugger does not do."""
        __tracebackhide__ = True
        self.asking.check("the debugger")
        super().interaction(frame, tb_or_exc)  # type: ignore[no-untyped-call]
        stopped, self._stopped = self._stopped, False
        if stopped:
            raise KeyboardInterrupt


def install_debugger(asking: Asking) -> None:
    """Let `breakpoint`, `pdb.set_trace`, `%debug` and `%pdb` use `RankPdb`.

    Args:
        asking: of this rank.
    """
    RankPdb.asking = asking
    debugger.Pdb = debugger.InterruptiblePdb = pdb.Pdb = RankPdb  # type: ignore[misc]
    pdb.set_trace = debugger.set_trace
    # ipykernel imports debugpy, whose hook waits for an IDE, or does nothing.
    sys.breakpointhook = sys.__breakpointhook__
