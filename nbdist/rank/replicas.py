"""Makes DistributedDataParallel safe to use in cells that are run again (rank).

DDP reduces gradients in C++, where nobody sees its calls. A communication hook that does the same
through `torch.distributed` makes them visible to the check of collectives.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

__all__ = ["watch_ddp"]


def watch_ddp(*, show_calls: bool) -> None:
    """Have DDP warn when its module is in a DDP already; called once, before user code has run.

    Args:
        show_calls: reduce by a hook that is seen, in every DDP that has no hook of its user at its
            first forward. The sums are the same.
    """
    from torch.nn.parallel import DistributedDataParallel

    wrap, forward = DistributedDataParallel.__init__, DistributedDataParallel._pre_forward

    @functools.wraps(wrap)
    def checked(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        if any(
            isinstance(part, DistributedDataParallel) for part in getattr(module, "modules", list)()
        ):
            warnings.warn(
                "DDP was asked to wrap a module that is in a DDP already, probably by an earlier "
                "run of this cell: every gradient would be reduced twice; wrap `model.module`, or "
                "build the model in the same cell",
                stacklevel=2,
            )
        wrap(self, module, *args, **kwargs)

    @functools.wraps(forward)
    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not (self._comm_hooks or self.mixed_precision):
            self.register_comm_hook(self.process_group, _reduce)
        return forward(self, *args, **kwargs)  # type: ignore[no-untyped-call]

    DistributedDataParallel.__init__ = checked  # type: ignore[method-assign]
    if show_calls:
        DistributedDataParallel._pre_forward = hooked  # type: ignore[method-assign]


def _reduce(group, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - torch checks them
    """Average a bucket of gradients, as torch does without a hook."""
    import torch.distributed as dist

    work = dist.all_reduce(bucket.buffer().div_(group.size()), group=group, async_op=True)
    # The callback keeps `work` until it is done: by it a rank that waits can say for what.
    return work.get_future().then(lambda done, _work=work: done.value()[0])
