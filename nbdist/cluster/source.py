"""What is checked before any rank is touched: rank lists and syntax (client)."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from IPython.core.inputtransformer2 import TransformerManager

__all__ = ["check_ranks", "check_source", "parse_ranks"]

_transformer = TransformerManager()


def parse_ranks(text: str, num_ranks: int) -> tuple[int, ...]:
    """Return the ranks that a text such as `0,2:4` or `-1` names.

    `a:b` counts from a up to but without b, as Python slices do; negative numbers count from
    the end.
    """
    chosen: list[int] = []
    for part in text.replace(" ", "").split(","):
        pieces = part.split(":")
        try:
            numbers = [int(piece) if piece else None for piece in pieces]
        except ValueError:
            numbers = []
        if len(numbers) == 1 and numbers[0] is not None:
            chosen.append(numbers[0])
        elif len(numbers) in (2, 3) and (len(numbers) == 2 or numbers[2] != 0):
            chosen.extend(range(*slice(*numbers).indices(num_ranks)))
        else:
            raise ValueError(
                f"ranks {text!r}: {part!r} is no rank and no slice of ranks; write numbers and "
                f"slices such as `0,2:4`; this world has ranks 0 to {num_ranks - 1}"
            )
    return tuple(chosen)


def check_ranks(ranks: Sequence[int] | str | None, num_ranks: int) -> tuple[int, ...]:
    """Return the wanted ranks, sorted and without repetition; None means all.

    Raises:
        ValueError: a rank does not exist, or none is named.
    """
    if ranks is None:
        return tuple(range(num_ranks))
    wanted = parse_ranks(ranks, num_ranks) if isinstance(ranks, str) else tuple(ranks)
    outside = [r for r in wanted if not -num_ranks <= r < num_ranks]
    if outside or not wanted:
        found = f"rank {outside[0]} is not in it" if outside else "they name no rank"
        raise ValueError(
            f"ranks {ranks!r} were asked for, but this world has ranks 0 to {num_ranks - 1}: "
            f"{found}"
        )
    return tuple(sorted({rank % num_ranks for rank in wanted}))


def check_source(source: str) -> None:
    """Raise SyntaxError if the source is not a cell that IPython could run."""
    transformed = _transformer.transform_cell(source)
    compile(
        transformed,
        "<cell>",
        "exec",
        flags=ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
        dont_inherit=True,
    )
