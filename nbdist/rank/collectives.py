"""Reads the arguments of torch's collectives: what must be equal on the ranks of a group (rank).

Each function here takes the arguments of the collective of its name. What may differ in a correct
program is left at ANY: sizes of all_to_all, gather and scatter, and of lists with uneven parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import distributed_c10d as c10d

from nbdist.rank.calls import ANY
from nbdist.rank.seen import REDUCTIONS, Seen

__all__ = ["PLAIN", "FUNCTIONAL", "Reader"]

Reader = Callable[..., Seen]
_REDUCTION_CODES: dict[Any, int] = {}
_T = Any  # tensors, groups and operations: torch is imported by the time these run


def _group_of(group: _T) -> _T:
    """Return the process group, or None when this rank is not in it."""
    if group is None:
        return c10d._get_default_group()
    if isinstance(group, str):
        return _resolve_process_group(c10d.GroupName(group))
    return None if group is c10d.GroupMember.NON_GROUP_MEMBER else group


def _root(group: _T, in_world: int | None, in_group: int | None) -> int:
    if in_group is not None:
        return c10d.get_global_rank(group, in_group)
    return ANY if in_world is None else int(in_world)


def _reduction(op: _T) -> int:
    try:
        return _REDUCTION_CODES[op]
    except KeyError:
        name = (op if isinstance(op, str) else str(getattr(op, "name", ""))).lower()
    code = REDUCTIONS.index(name) if name in REDUCTIONS else ANY
    if isinstance(op, str | c10d.ReduceOp.RedOpType):
        _REDUCTION_CODES[op] = code
    return code


def _total(tensors: Sequence[_T]) -> int:
    """Return the elements of a list of parts; uneven parts may differ from rank to rank."""
    sizes = {tensor.numel() for tensor in tensors}
    return sizes.pop() * len(tensors) if len(sizes) == 1 else ANY


def _all_reduce(tensor: _T, op: _T = "sum", group: _T = None, *_: _T, **__: _T) -> Seen:
    return Seen("all_reduce", _group_of(group), tensor, tensor.numel(), _reduction(op))


def _broadcast(
    tensor: _T,
    src: int | None = None,
    group: _T = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Seen:
    del async_op
    made = _group_of(group)
    return Seen("broadcast", made, tensor, tensor.numel(), root=_root(made, src, group_src))


def _reduce(  # noqa: PLR0917 - as torch has it
    tensor: _T,
    dst: int | None = None,
    op: _T = "sum",
    group: _T = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Seen:
    del async_op
    made, reduction = _group_of(group), _reduction(op)
    return Seen("reduce", made, tensor, tensor.numel(), reduction, _root(made, dst, group_dst))


def _all_gather(tensor_list: _T, tensor: _T, group: _T = None, *_: _T, **__: _T) -> Seen:
    numel = ANY if _total(tensor_list) == ANY else tensor.numel()
    return Seen("all_gather", _group_of(group), tensor, numel)


def _all_gather_single(
    output_tensor: _T, input_tensor: _T, group: _T = None, *_: _T, **__: _T
) -> Seen:
    del output_tensor
    return Seen("all_gather", _group_of(group), input_tensor, input_tensor.numel())


def _reduce_scatter(
    output: _T, input_list: _T, op: _T = "sum", group: _T = None, *_: _T, **__: _T
) -> Seen:
    made, numel = _group_of(group), _total(input_list)
    return Seen("reduce_scatter", made, output, numel, _reduction(op))


def _reduce_scatter_single(
    output: _T,
    input: _T,  # noqa: A002 - torch's name
    op: _T = "sum",
    group: _T = None,
    *_: _T,
    **__: _T,
) -> Seen:
    made, numel = _group_of(group), input.numel()
    return Seen("reduce_scatter", made, output, numel, _reduction(op))


def _all_to_all(
    output_tensor_list: _T, input_tensor_list: _T, group: _T = None, *_: _T, **__: _T
) -> Seen:
    del output_tensor_list
    return Seen("all_to_all", _group_of(group), input_tensor_list[0])


def _all_to_all_single(
    output: _T,
    input: _T,  # noqa: A002 - torch's name
    output_split_sizes: _T = None,
    input_split_sizes: _T = None,
    group: _T = None,
    *_: _T,
    **__: _T,
) -> Seen:
    del output, output_split_sizes, input_split_sizes
    return Seen("all_to_all", _group_of(group), input)


def _gather(  # noqa: PLR0917 - as torch has it
    tensor: _T,
    gather_list: _T = None,
    dst: int | None = None,
    group: _T = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Seen:
    del gather_list, async_op
    made = _group_of(group)
    return Seen("gather", made, tensor, root=_root(made, dst, group_dst))


def _scatter(  # noqa: PLR0917 - as torch has it
    tensor: _T,
    scatter_list: _T = None,
    src: int | None = None,
    group: _T = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Seen:
    del scatter_list, async_op
    made = _group_of(group)
    return Seen("scatter", made, tensor, root=_root(made, src, group_src))


def _barrier(group: _T = None, *_: _T, **__: _T) -> Seen:
    return Seen("barrier", _group_of(group))


def _monitored_barrier(group: _T = None, *_: _T, **__: _T) -> Seen:
    return Seen("monitored_barrier", _group_of(group))


def _coalesced(op: str) -> Reader:
    def read(*arguments: _T, group: _T = None, **_: _T) -> Seen:
        # Positions differ from collective to collective; the group alone is wanted.
        groups = [a for a in arguments if hasattr(a, "group_name")]
        return Seen(op, _group_of(group if group is not None else (groups or [None])[0]))

    return read


def _message(op: str) -> Reader:
    def read(
        tensor: _T,
        peer: int | None = None,
        group: _T = None,
        tag: int = 0,
        *,
        dst: int | None = None,
        src: int | None = None,
        group_dst: int | None = None,
        group_src: int | None = None,
    ) -> Seen:
        del tag
        made = _group_of(group)
        in_world = next((r for r in (peer, dst, src) if r is not None), None)
        in_group = group_dst if group_dst is not None else group_src
        other = _root(made, in_world, in_group)
        return Seen(op, made, tensor, tensor.numel(), root=other, peer_to_peer=True)

    return read


def _batch(p2p_op_list: _T) -> Seen:
    made = _group_of(p2p_op_list[0].group)
    return Seen("batch_isend_irecv", made, p2p_op_list[0].tensor, peer_to_peer=True)


def _functional(op: str, *, sized: bool = True, has_reduction: bool = False) -> Reader:
    """Return a reader of a functional collective: `(tensor, [reduction,] ..., group, tag)`."""
    position = {"all_to_all": 2, "reduce_scatter": 2}.get(op, 1)

    def read(self: _T, *arguments: _T, **named: _T) -> Seen:
        from torch.distributed import _functional_collectives as funcol

        def argument(name: str, index: int) -> _T:
            return named[name] if name in named else arguments[index]

        tag = (
            ""
            if "tag" not in named and len(arguments) <= position + 1
            else argument("tag", position + 1)
        )
        made = _group_of(funcol._resolve_group_name(argument("group", position), tag))
        return Seen(
            op,
            made,
            self,
            self.numel() if sized else ANY,
            _reduction(argument("reduceOp", 0)) if has_reduction else ANY,
            int(argument("src", 0)) if op == "broadcast" else ANY,
        )

    return read


PLAIN: dict[str, Reader] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather_single,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "gather": _gather,
    "scatter": _scatter,
    "barrier": _barrier,
    "monitored_barrier": _monitored_barrier,
    "all_reduce_coalesced": _coalesced("all_reduce_coalesced"),
    "all_gather_coalesced": _coalesced("all_gather_coalesced"),
    "send": _message("send"),
    "recv": _message("recv"),
    "isend": _message("isend"),
    "irecv": _message("irecv"),
    "batch_isend_irecv": _batch,
}
"""Functions of `torch.distributed`; older names such as all_gather_into_tensor call these."""

FUNCTIONAL: dict[str, Reader] = {
    "all_reduce": _functional("all_reduce", has_reduction=True),
    "broadcast": _functional("broadcast"),
    "all_gather_single": _functional("all_gather"),
    "reduce_scatter_single": _functional("reduce_scatter", has_reduction=True),
    "all_to_all_single": _functional("all_to_all", sized=False),
    "all_to_all_single_autograd": _functional("all_to_all", sized=False),
}
"""Functions of `torch.distributed._functional_collectives`, which DTensor calls."""
