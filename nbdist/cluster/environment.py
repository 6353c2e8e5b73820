"""The variables that ranks and the controller are started with (client)."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import nbdist
from nbdist.cluster.config import WorldConfig
from nbdist.cluster.mpi import Launcher
from nbdist.runfiles import WorldRecord

__all__ = ["rank_environment"]


def rank_environment(
    record: WorldRecord, config: WorldConfig, launcher: Launcher
) -> dict[str, str]:
    """Return the user's variables over the defaults, and under what a world cannot do without."""
    cores = len(os.sched_getaffinity(0))
    threads = config.threads_per_rank or max(1, cores // record.num_ranks)
    paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    home = str(Path(nbdist.__file__).parent.parent)
    if home not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        paths.insert(0, home)
    defaults = {
        **launcher.environment(),
        "OMP_NUM_THREADS": str(threads),
        # Waiting threads of one rank must not take the cores of the others.
        "OMP_WAIT_POLICY": "PASSIVE",
        "GLOO_SOCKET_IFNAME": "lo",
        # A failed NCCL collective must not end the process that holds the user's state.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        # Activations are allocated and freed in every step. By default glibc gives them back
        # to the kernel and faults them in again, page by page (40,000 faults a step seen);
        # kept, and in huge pages, they cost 5 to 9% less of a small model's step.
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(512 << 20),
        "MALLOC_TOP_PAD_": str(64 << 20),
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    }
    forced = {
        "NBDIST_INTERFACE": config.interface,
        "PYTHONPATH": os.pathsep.join(paths),
        # Nothing of a world is read from or written to the user's home.
        "IPYTHONDIR": str(Path(record.directory) / "profile"),
    }
    return {**defaults, **os.environ, **forced}
