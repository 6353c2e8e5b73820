"""`torch.compile` of a model's blocks, where it works (ranks)."""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import TYPE_CHECKING

import torch

from nbdist.train.mesh import Axis, axis_size
from nbdist.train.models import MixtureOfExperts
from nbdist.train.parallelize.data import blocks

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["check_compile", "compile_each"]


def check_compile(model: nn.Module, mesh: DeviceMesh) -> None:
    """Refuse what cannot be compiled, or gains nothing by it; touches nothing.

    Raises:
        ValueError: axes or layers whose code dynamo cannot take as a whole, or no compiler.
    """
    cut = {axis: n for axis in (Axis.TP, Axis.CP, Axis.EP) if (n := axis_size(mesh, axis)) > 1}
    has_experts = any(isinstance(module, MixtureOfExperts) for module in model.modules())
    if cut or has_experts:
        found = ", ".join(f"{axis}={size}" for axis, size in cut.items()) or "experts"
        raise ValueError(
            f"compile_blocks=True was asked for a model with {found}: a block then talks to other "
            "ranks, or its sizes follow from values, inside of it, which torch.compile cannot take "
            "as one piece; use dp_replicate, dp_shard and pp, or leave compile_blocks out"
        )
    _check_compiler(mesh.device_type)


def _check_compiler(device_type: str) -> None:
    """Look for what torch's inductor calls: a C++ compiler for a CPU, Triton and C for a GPU."""
    variable, default = ("CXX", "g++") if device_type == "cpu" else ("CC", "gcc")
    command = os.environ.get(variable) or default
    missing = "" if shutil.which(command) else f"the compiler `{command}`"
    if device_type != "cpu" and importlib.util.find_spec("triton") is None:
        missing = "the package triton"
    if missing:
        raise ValueError(
            f"compile_blocks=True was asked for, but {missing}, which torch.compile needs on this "
            f"host, is not there; install it (on Debian: `apt-get install g++`), name another "
            f"compiler in {variable}, or leave compile_blocks out"
        )


def compile_each(model: nn.Module) -> None:
    """Compile every block, in place; a model without blocks as a whole.

    Equal blocks share their code. Only `forward`: hooks around a block, such as FSDP's, stay out,
    and so do the names of its weights.
    """
    for part in blocks(model) or [model]:
        part.forward = torch.compile(part.forward)
