"""`parallelize`: the one place that knows the order in which a model is spread (ranks)."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, TypedDict

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from nbdist.train.mesh import Axis, axis_size, build_mesh
from nbdist.train.parallelize.checks import agree, check_materialized, move
from nbdist.train.parallelize.compiling import check_compile, compile_each
from nbdist.train.parallelize.context import check_context, spread_context
from nbdist.train.parallelize.data import check_strategy, recompute_blocks, sharding_of, spread_data
from nbdist.train.parallelize.expert import check_experts, spread_experts
from nbdist.train.parallelize.pipeline import Pipeline, PipelineConfig, plan_stages
from nbdist.train.parallelize.record import Again, Applied, Strategy, applied_to, remember
from nbdist.train.parallelize.skeleton import Skeleton
from nbdist.train.parallelize.tensor import resolve_plan, spread_tensors

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from nbdist.train.communication import CommunicationConfig
    from nbdist.train.parallelize.pipeline import Stages
    from nbdist.train.parallelize.plans import Plan

__all__ = ["mesh_of", "parallelize"]


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    strategy: Strategy = "zero3",
    plan: Plan | None = None,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
    param_dtype: torch.dtype | None = None,
    checkpoint_activations: bool = False,
    compile_blocks: bool = False,
    pipeline: PipelineConfig | None = None,
    communication: CommunicationConfig | None = None,
) -> nn.Module:
    """Spread a model over a mesh. Collective over: all ranks.

    All ranks start from rank 0's weights. The model is changed in place and returned; with
    `strategy="ddp"` it is returned inside DDP. One that is spread already is returned as it is.

    Data parallel (`dp_replicate`, `dp_shard`) takes any module: the blocks of its largest
    `ModuleList` become one group of weights each, the rest is one more. What a rank holds whole:

    - "ddp": weights, gradients and optimizer state.
    - "zero1": weights within a step, and gradients until the last micro-batch.
    - "zero2": weights within a step; gradients are reduced in every micro-batch.
    - "zero3": one block's weights at a time; gradients until the last micro-batch.

    Args:
        model: the whole model, equally built on every rank.
        mesh: from `build_mesh`.
        strategy: of the data-parallel axes.
        plan: for `tp`: {module name: "column" | "row" | "embedding" | "vocabulary" | "sequence"},
            or styles of `torch.distributed.tensor.parallel`; `*` stands for one part of a name.
            Inferred when None.
        sequence_parallel: with `tp`, keep rows cut by token between the cut layers (DecoderLM).
        loss_parallel: with `tp`, leave logits cut over the vocabulary; `Trainer` then computes
            cross-entropy without gathering them.
        param_dtype: dtype of forward and backward, such as `torch.bfloat16`; the weights that
            the optimizer changes, and gradient sums, keep theirs.
        checkpoint_activations: keep only the inputs of blocks for backward and compute the rest
            again: less memory, about a third more time.
        compile_blocks: `torch.compile` of each block, when it is first called; on `dp_*` and `pp`.
        pipeline: for `pp`: schedule, micro-batches and cuts. A rank then keeps its own layers
            only, and the model cannot be called: `Trainer` runs it.
        communication: how gradients travel: compression, buckets, prefetch.

    Raises:
        ValueError: the ranks built different models, a model without memory (meta device), or
            options that do not go together.
    """
    if applied_to(model) or isinstance(model, FSDPModule | DistributedDataParallel):
        return model
    _check_model(model, mesh, strategy, param_dtype, communication, compiled=compile_blocks)
    skeleton = Skeleton.of(model)
    tp = axis_size(mesh, Axis.TP)
    cut: _Cut = {"sequence_parallel": sequence_parallel, "loss_parallel": loss_parallel}
    _check_cut(tp, cut)
    whole_plan = resolve_plan(model, plan, tp, **cut) if tp > 1 else None
    move(model, mesh.device_type)
    stages = _plan_pipeline(model, mesh, pipeline, sequence_parallel=sequence_parallel)
    agree(model)
    _spread_layers(model, mesh, whole_plan, cut)
    _wrap_blocks(model, compiled=compile_blocks, recomputed=checkpoint_activations)
    sharding = None if strategy == "ddp" else sharding_of(mesh, strategy, param_dtype)
    spread_experts(model, mesh, sharding)
    piped = Pipeline(model, mesh, stages, sharding) if stages else None
    if piped is None and (sharding or strategy == "ddp"):
        model = spread_data(model, mesh, sharding, communication)
    given = _Given(
        plan=plan, strategy=strategy, param_dtype=param_dtype, communication=communication,
        checkpoint_activations=checkpoint_activations, compile_blocks=compile_blocks,
        pipeline=_as_cut(pipeline, stages), **cut,
    )  # fmt: skip
    again, texts = Again(skeleton, given), _texts(whole_plan)
    remember(model, Applied(mesh, strategy, loss_parallel, texts, piped, again))
    return model


def _as_cut(config: PipelineConfig | None, stages: Stages | None) -> PipelineConfig | None:
    """Return the settings with the cuts that were found: measured again, others may come out."""
    if stages is None:
        return None
    cuts = tuple(part[0] for part in stages.parts[1:])
    return dataclasses.replace(config or PipelineConfig(), cuts=cuts, sample=None)


def _spread_layers(model: nn.Module, mesh: DeviceMesh, plan: Plan | None, cut: _Cut) -> None:
    if plan is not None:
        _quiet_redistribution()
        spread_tensors(model, mesh[Axis.TP], plan, **cut)
    spread_context(model, mesh)


def _wrap_blocks(model: nn.Module, *, compiled: bool, recomputed: bool) -> None:
    if compiled:
        compile_each(model)
    if recomputed:  # outside: what is computed again is compiled code
        recompute_blocks(model)


def _quiet_redistribution() -> None:
    # one long line a rank for every weight that two axes cut, on what torch may do faster one day
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


class _Cut(TypedDict):
    sequence_parallel: bool
    loss_parallel: bool


class _Given(_Cut):
    strategy: Strategy
    plan: Plan | None
    param_dtype: torch.dtype | None
    checkpoint_activations: bool
    compile_blocks: bool
    pipeline: PipelineConfig | None
    communication: CommunicationConfig | None


def _texts(plan: Plan | None) -> dict[str, str] | None:
    return None if plan is None else {name: str(style) for name, style in plan.items()}


def _check_cut(tp: int, cut: _Cut) -> None:
    if any(cut.values()) and tp == 1:
        raise ValueError(
            "sequence_parallel and loss_parallel cut what `tp` ranks share, but the mesh has "
            "tp=1; set MeshConfig(tp=...), or leave them out"
        )


def _plan_pipeline(
    model: nn.Module, mesh: DeviceMesh, config: PipelineConfig | None, *, sequence_parallel: bool
) -> Stages | None:
    pp = axis_size(mesh, Axis.PP)
    if pp == 1:
        if config is not None:
            raise ValueError(
                "pipeline=PipelineConfig(...) was given, but the mesh has pp=1; set "
                "MeshConfig(pp=...), or leave pipeline out"
            )
        return None
    if sequence_parallel:
        raise ValueError(
            f"sequence_parallel=True was asked for with pp={pp}: a stage would take the length of "
            "its rows from a part of them; leave one of the two out"
        )
    return plan_stages(model, mesh, config or PipelineConfig())


def _check_model(
    model: nn.Module,
    mesh: DeviceMesh,
    strategy: Strategy,
    param_dtype: torch.dtype | None,
    communication: CommunicationConfig | None,
    *,
    compiled: bool,
) -> None:
    _check_mesh(mesh)
    shards = strategy != "ddp" and axis_size(mesh, Axis.PP) == 1
    check_materialized(model, may_be_empty=shards)
    check_strategy(strategy, mesh, param_dtype, communication)
    check_experts(model, mesh)
    check_context(model, mesh)
    if compiled:
        check_compile(model, mesh)


def _check_mesh(mesh: DeviceMesh) -> None:
    names = mesh.mesh_dim_names or ()
    unknown = [name for name in names if name not in list(Axis)]
    if unknown or Axis.DP_SHARD not in names:
        raise ValueError(
            f"parallelize was given a mesh with the axes {names}; it knows "
            f"{', '.join(Axis)}, and needs dp_shard; make it with build_mesh(MeshConfig(...))"
        )


def mesh_of(model: nn.Module, mesh: DeviceMesh | None) -> DeviceMesh:
    """Return the mesh to train a model on: its own, the given one, or all ranks on `dp_shard`.

    Raises:
        ValueError: the model lies on another mesh than the given one.
    """
    applied = applied_to(model)
    if applied is None:
        return build_mesh() if mesh is None else mesh
    if mesh is not None and mesh != applied.mesh:
        raise ValueError(
            f"the model was spread over {applied.mesh}, but {mesh} was given; leave mesh out, or "
            "build the model again"
        )
    return applied.mesh
