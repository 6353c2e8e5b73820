"""What a rank runs of a cell that is in the middle of a `fit()` (rank).

Of a cell that others are inside of, a new rank runs that call's statement, with the call replaced
by one that joins them, and all that follows it. Of a cell that has stopped there, every rank runs
the same, with `trainer.go_on()` in place of the call.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable
from types import FrameType

__all__ = ["Call", "call_site", "joined_at", "pause_site", "resumed_at"]

Call = tuple[int, ...]
"""Line and column of a call's begin and end, as `ast` counts them."""

_LATER = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

_BEGIN = "__import__('nbdist.rank.survive', fromlist=['begin']).begin()"
_GO_ON = "__import__('nbdist.rank.survive', fromlist=['go_on']).go_on()"


def call_site(frame: FrameType | None, cell_numbers: dict[str, int]) -> tuple[Call, str]:
    """Return where a cell has called what runs, and why a new rank could not take that up.

    Args:
        frame: inside the call.
        cell_numbers: of the file names that cells' code has.

    Returns:
        The call and an empty text, or an empty call and a sentence.
    """
    while frame is not None and frame.f_code.co_filename not in cell_numbers:
        caller = frame.f_back
        is_ours = str(frame.f_globals.get("__name__", "")).startswith("nbdist.")
        if not is_ours:
            return (), f"fit() was called by {frame.f_code.co_qualname}, not by the cell itself"
        frame = caller
    if frame is None:
        return (), "no cell has called fit()"
    if frame.f_code.co_name != "<module>":
        return (), f"the cell called fit() inside {frame.f_code.co_qualname}()"
    call = _position(frame)
    if joined_at(_tree(frame), call) is None:
        return (), "fit() was called in a loop or an expression that cannot be begun in its middle"
    return call, ""


def pause_site(frame: FrameType | None, cell_numbers: dict[str, int]) -> tuple[Call, str]:
    """Return the `fit()` that a cell is inside of, and why it could not go on there after a stop.

    Args:
        frame: the innermost, of any thread.
        cell_numbers: of the file names that cells' code has.

    Returns:
        The call and an empty text, or an empty call and a sentence.
    """
    while frame is not None and not _is_training(frame):
        frame = frame.f_back
    if frame is None:
        return (), "the cell is not inside fit()"
    call, problem = call_site(frame, cell_numbers)
    while frame is not None and frame.f_code.co_filename not in cell_numbers:
        frame = frame.f_back
    if frame is not None and not problem and resumed_at(_tree(frame), call) is None:
        return (), "fit() was not called by a trainer's name, as in `trainer.fit()`"
    return call, problem


def _is_training(frame: FrameType) -> bool:
    module = frame.f_globals.get("__name__")
    return frame.f_code.co_name == "go_on" and module == "nbdist.train.trainer"


def _tree(frame: FrameType) -> ast.Module:
    return ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))


def _position(frame: FrameType) -> Call:
    positions = list(frame.f_code.co_positions())
    line, end_line, column, end_column = positions[frame.f_lasti // 2]
    return (line or 0, column or 0, end_line or 0, end_column or 0)


def joined_at(tree: ast.Module, call: Call) -> ast.Module | None:
    """Return what a new rank runs of a cell; None when the call is in a loop or a function.

    The tree itself is changed.
    """
    rest = _rest(tree.body, call, lambda _node: ast.parse(_GO_ON, mode="eval").body)
    if rest is None:
        return None
    first = ast.parse(_BEGIN).body[0]
    _place(first, rest[0])
    return ast.Module(body=[first, *rest], type_ignores=[])


def resumed_at(tree: ast.Module, call: Call) -> ast.Module | None:
    """Return what all ranks run of a cell that has stopped; None as `joined_at`.

    Also None when the call is not by a name, as in `Trainer(...).fit()`: what stands before the
    dot would be made anew. The tree itself is changed.
    """
    rest = _rest(tree.body, call, _resumed)
    return None if rest is None else ast.Module(body=rest, type_ignores=[])


def _resumed(node: ast.Call) -> ast.expr | None:
    if not isinstance(node.func, ast.Attribute) or not isinstance(node.func.value, ast.Name):
        return None
    return ast.parse(f"{node.func.value.id}.go_on()", mode="eval").body


_Replace = Callable[[ast.Call], ast.expr | None]


def _rest(body: list[ast.stmt], call: Call, replace: _Replace) -> list[ast.stmt] | None:
    """Return the statements of a block from the one that holds the call on."""
    for index, statement in enumerate(body):
        if not _holds(statement, call):
            continue
        begun = _begun(statement, call, replace)
        return None if begun is None else [*begun, *body[index + 1 :]]
    return None


def _begun(statement: ast.stmt, call: Call, replace: _Replace) -> list[ast.stmt] | None:
    if isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign):
        replacing = _Replacing(call, replace)
        replacing.visit(statement)
        return [statement] if replacing.done else None
    if isinstance(statement, ast.If):
        return _rest(statement.body, call, replace) or _rest(statement.orelse, call, replace)
    if isinstance(statement, ast.With | ast.Try):
        rest = _rest(statement.body, call, replace)
        if rest is None:
            return None
        statement.body = rest
        return [statement]
    return None


class _Replacing(ast.NodeTransformer):
    """Replaces the call."""

    def __init__(self, call: Call, replace: _Replace) -> None:
        self._call = call
        self._replace = replace
        self.done = False

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if _where(node) != self._call:
            return self.generic_visit(node)
        if (other := self._replace(node)) is None:
            return node
        self.done = True
        _place(other, node)
        return other

    def visit(self, node: ast.AST) -> ast.AST:
        """Visit a node, but not what is run later, or often."""
        return node if isinstance(node, _LATER) else super().visit(node)


def _place(made: ast.AST, at: ast.AST) -> None:
    """Let tracebacks show what stands in the cell."""
    for part in ast.walk(made):
        if hasattr(part, "lineno"):
            ast.copy_location(part, at)


def _where(node: ast.expr) -> Call:
    return (node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0)


def _holds(statement: ast.stmt, call: Call) -> bool:
    return any(isinstance(n, ast.Call) and _where(n) == call for n in ast.walk(statement))
