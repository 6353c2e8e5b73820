"""What one rank of a host does for the others: downloads, caches (ranks)."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist

from nbdist.errors import NbdistError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["rank0_first"]


@contextmanager
def rank0_first() -> Iterator[bool]:
    """Run the body on the first rank of each host, then on the others: one download a host.

    Collective over: the default group, when entered and left. The body must hold no collective.
    `LOCAL_RANK` tells which rank is first; without a process group the body runs at once.

        with rank0_first():
            data = load_dataset(name)  # the others find the files of the first

    Yields:
        Whether this rank is the first of its host.

    Raises:
        NbdistError: on the other ranks, when the body failed on a first one; there its own error.
    """
    if not dist.is_initialized():
        yield True
        return
    is_first = dist.get_node_local_rank(fallback_rank=dist.get_rank()) == 0
    if is_first:
        problem = ""
        try:
            yield True
        except BaseException as error:
            problem = f"{type(error).__name__}: {error}"
            raise
        finally:
            _tell(problem)
        return
    problems = {rank: text for rank, text in enumerate(_tell("")) if text}
    if problems:
        rank, text = next(iter(problems.items()))
        raise NbdistError(
            f"rank0_first() was to run its body on the first rank of each host before this one, "
            f"but there, on rank {rank}, it raised {text}; mend that and run it again on all ranks"
        )
    yield False


def _tell(problem: str) -> list[str]:
    everyone = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, problem)
    return everyone
