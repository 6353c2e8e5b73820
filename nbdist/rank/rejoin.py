"""What a new rank runs of a cell that the others are in the middle of (rank).

The others are inside one call, such as `trainer.fit()`. The new rank runs that call's statement,
with the call replaced by one that joins them, and all that follows it in the cell.
"""

from __future__ import annotations

import ast
import linecache
from types import FrameType

__all__ = ["Call", "call_site", "rest_of"]

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
    source = "".join(linecache.getlines(frame.f_code.co_filename))
    if rest_of(ast.parse(source), call) is None:
        return (), "fit() was called in a loop or an expression that cannot be begun in its middle"
    return call, ""


def _position(frame: FrameType) -> Call:
    positions = list(frame.f_code.co_positions())
    line, end_line, column, end_column = positions[frame.f_lasti // 2]
    return (line or 0, column or 0, end_line or 0, end_column or 0)


def rest_of(tree: ast.Module, call: Call) -> ast.Module | None:
    """Return what a new rank runs of a cell; None when the call is in a loop or a function.

    The tree itself is changed.
    """
    rest = _rest(tree.body, call)
    if rest is None:
        return None
    first = ast.parse(_BEGIN).body[0]
    for node in ast.walk(first):
        if hasattr(node, "lineno"):
            ast.copy_location(node, rest[0])
    return ast.Module(body=[first, *rest], type_ignores=[])


def _rest(body: list[ast.stmt], call: Call) -> list[ast.stmt] | None:
    """Return the statements of a block from the one that holds the call on."""
    for index, statement in enumerate(body):
        if not _holds(statement, call):
            continue
        begun = _begun(statement, call)
        return None if begun is None else [*begun, *body[index + 1 :]]
    return None


def _begun(statement: ast.stmt, call: Call) -> list[ast.stmt] | None:
    if isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign):
        joining = _Joining(call)
        joining.visit(statement)
        return [statement] if joining.done else None
    if isinstance(statement, ast.If):
        return _rest(statement.body, call) or _rest(statement.orelse, call)
    if isinstance(statement, ast.With | ast.Try):
        rest = _rest(statement.body, call)
        if rest is None:
            return None
        statement.body = rest
        return [statement]
    return None


class _Joining(ast.NodeTransformer):
    """Replaces the call."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.done = False

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if _where(node) != self._call:
            return self.generic_visit(node)
        self.done = True
        joining = ast.parse(_GO_ON, mode="eval").body
        for part in ast.walk(joining):
            if hasattr(part, "lineno"):
                ast.copy_location(part, node)
        return joining

    def visit(self, node: ast.AST) -> ast.AST:
        """Visit a node, but not what is run later, or often."""
        return node if isinstance(node, _LATER) else super().visit(node)


def _where(node: ast.expr) -> Call:
    return (node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0)


def _holds(statement: ast.stmt, call: Call) -> bool:
    return any(isinstance(n, ast.Call) and _where(n) == call for n in ast.walk(statement))
