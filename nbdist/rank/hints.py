"""Says what to do about errors that running a cell again in living ranks leads to (rank)."""

from __future__ import annotations

import re

__all__ = ["hint_for"]

_REBUILD = (
    "the process group was made anew after a failure or a stop, and what was built on the one "
    "before (DDP, fully_shard, a DeviceMesh, new_group) is of no use any more; run the cell that "
    "builds the model again"
)

_HINTS = {
    r"initialize the default process group twice": (
        "the ranks are in a process group already: leave init_process_group out; `rank`, "
        "`world_size` and `mesh` are set on every rank"
    ),
    r"Default process group has not been initialized": (
        "destroy_process_group was called on this rank; `%distributed restart` starts ranks with a "
        "new group, and cells need not destroy it"
    ),
    r"Expected to have finished reduction in the prior iteration": (
        "if the step before was stopped or failed, wrap the model again, `DDP(model.module)`; if "
        "not, some parameters have no part in the loss: DDP(..., find_unused_parameters=True)"
    ),
    r"composable distributed API can only be applied to a module once": (
        "the module is sharded already, by an earlier run of this cell; build the model in the "
        "same cell, or use nbdist.train.parallelize, which takes a sharded model as it is"
    ),
    r"does not have a sharding strategy registered": (
        "a model sharded by fully_shard was given to code for plain tensors, such as DDP; use one "
        "of the two, or `tensor.full_tensor()` on all ranks"
    ),
    (
        r"Can't get attribute .* on <module '__main__'|attribute lookup .* on __main__ failed|"
        r"DataLoader worker \(pid.*exited unexpectedly"
    ): (
        "processes that are spawned cannot see classes of a notebook: leave "
        "multiprocessing_context out (Linux then forks), or import the class from a .py file"
    ),
    r"CUDA out of memory": (
        "`%distributed who` lists what the ranks hold; `del` what is not needed, then "
        "torch.cuda.empty_cache(); fully_shard splits a model over the ranks"
    ),
}
_OF_AN_OLD_GROUP = re.compile(
    r"Connection (closed|reset) by peer|is not initialized in the world group map|"
    r"Could not resolve the process group"
)


def hint_for(text: str, *, generation: int) -> str:
    """Return advice for the text of an error, or nothing.

    Args:
        text: what the exception says.
        generation: of the rank's process group; from 1 on there was another one before.
    """
    for pattern, hint in _HINTS.items():
        if re.search(pattern, text):
            return hint
    return _REBUILD if generation > 0 and _OF_AN_OLD_GROUP.search(text) else ""
