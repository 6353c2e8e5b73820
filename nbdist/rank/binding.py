"""Who a rank is: read from MPI, then bound to a device (rank)."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

__all__ = ["Place", "read_place", "take_place", "Device", "bind_device"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where MPI has put this process."""

    rank: int
    world_size: int
    local_rank: int
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a rank computes on; `memory_bytes` is the device's whole memory."""

    name: str
    label: str
    memory_bytes: int


def read_place(expected_world_size: int) -> Place:
    """Initialise MPI and return this process's place.

    Raises:
        RuntimeError: MPI sees another number of ranks than were started, which happens when
            mpi4py has loaded another MPI than the launcher's.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.size != expected_world_size:
        raise RuntimeError(
            f"{expected_world_size} ranks were started, but MPI sees {world.size}: mpi4py uses "
            f"{MPI.Get_library_version().splitlines()[0]!r} while the launcher is "
            f"{os.environ.get('NBDIST_MPIRUN', 'another one')}; point MPI4PY_LIBMPI at the "
            "launcher's libmpi, or install the extra `nbdist[mpi]` and leave no other on PATH"
        )
    node = world.Split_type(MPI.COMM_TYPE_SHARED, key=world.rank)
    return Place(
        rank=world.rank, world_size=world.size, local_rank=node.rank, host=socket.gethostname()
    )


def take_place(rank: int, local_rank: int, world_size: int) -> Place:
    """Return the place of a rank that has ended, for the process that replaces it.

    MPI is left alone: this process is alone in an MPI world of its own, which user code may open.
    """
    return Place(rank=rank, world_size=world_size, local_rank=local_rank, host=socket.gethostname())


def bind_device(local_rank: int) -> Device:
    """Bind this process to its device: the GPU of its local rank, else the CPU.

    Raises:
        RuntimeError: the host has GPUs, but fewer than ranks.
    """
    import psutil
    import torch

    if not torch.cuda.is_available():
        threads = torch.get_num_threads()
        return Device(
            name="cpu",
            label=f"{threads} thread{'s' if threads > 1 else ''}",
            memory_bytes=psutil.virtual_memory().total,
        )
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise RuntimeError(
            f"local rank {local_rank} needs a GPU of its own, but this host has {count}; start "
            f"{count} ranks, or set CUDA_VISIBLE_DEVICES='' to run on the CPU"
        )
    torch.cuda.set_device(local_rank)
    properties = torch.cuda.get_device_properties(local_rank)
    return Device(
        name=f"cuda:{local_rank}", label=properties.name, memory_bytes=properties.total_memory
    )
