"""Finds an MPI launcher and builds its command line (client)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nbdist.errors import StartError

__all__ = ["Launcher", "find_launcher"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """An MPI launcher on this host.

    Attributes:
        command: its path.
        flavour: `openmpi` or `mpich`.
        version: the line it names itself with.
        library: the libmpi that belongs to it; empty when it stands nowhere near.
    """

    command: str
    flavour: str
    version: str
    library: str = ""

    def arguments(self, num_ranks: int, program: list[str]) -> list[str]:
        """Return the command line that starts `program` on `num_ranks` ranks.

        A dead rank must not end the others: Open MPI has a switch for that. MPICH has none
        that works (5.0.2), so there a death ends the world.
        """
        count = ["-n", str(num_ranks)]
        if self.flavour == "openmpi":
            return [self.command, "--enable-recovery", *count, *program]
        return [self.command, *count, *program]

    def environment(self) -> dict[str, str]:
        """Return the variables that this launcher needs on a workstation.

        More ranks than cores are allowed, root may start ranks, and the probing of libfabric
        (1 s of MPI_Init) is left out unless the user has chosen transports.
        """
        settings = {"NBDIST_MPIRUN": f"{self.version} at {self.command}"}
        if self.library:
            settings["MPI4PY_LIBMPI"] = self.library
        if self.flavour == "openmpi":
            settings |= {
                "OMPI_MCA_btl": "^ofi",
                "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
                "OMPI_MCA_rmaps_base_oversubscribe": "1",
            }
            if os.geteuid() == 0:
                settings |= {
                    "OMPI_ALLOW_RUN_AS_ROOT": "1",
                    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                }
        return settings


def find_launcher(
    command: str | None = None, environment: Mapping[str, str] = os.environ
) -> Launcher:
    """Return the MPI to start ranks with: the one named, PATH's, or the `mpi` extra's.

    Raises:
        StartError: there is none, or it is neither Open MPI nor MPICH.
    """
    found = _locate(command, environment)
    if found is None:
        asked = f"`{command}`" if command else "`mpirun` or `mpiexec` on PATH"
        raise StartError(
            f"no MPI launcher: looked for {asked} and in {Path(sys.prefix) / 'bin'}, found none; "
            "type `pip install 'nbdist[mpi]'` (Open MPI from PyPI), or load your cluster's MPI",
            stage="find MPI",
        )
    done = subprocess.run([found, "--version"], capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    version = lines[0] if lines else ""
    if "Open MPI" in text or "OpenRTE" in text or "PRRTE" in text:
        flavour = "openmpi"
        version = version.removeprefix("mpirun ").replace("(", "").replace(")", "")
    elif "HYDRA" in text or "MPICH" in text:
        flavour = "mpich"
        version = "MPICH " + next((x.split()[-1] for x in lines if x.startswith("Version")), "")
    else:
        raise StartError(
            f"{found} is no Open MPI and no MPICH; `--version` said {lines[:2] or 'nothing'}; "
            "name another with mpi_command=, or type `pip install 'nbdist[mpi]'`",
            stage="find MPI",
        )
    return Launcher(
        command=found, flavour=flavour, version=version, library=_library_of(found, flavour)
    )


def _locate(command: str | None, environment: Mapping[str, str]) -> str | None:
    if command:
        return shutil.which(command, path=environment.get("PATH"))
    own = str(Path(sys.prefix) / "bin")
    parts = [p for p in environment.get("PATH", "").split(os.pathsep) if p and p != own]
    # A cluster's own MPI goes before the wheel of this environment.
    for path in (os.pathsep.join(parts), own):
        for name in ("mpirun", "mpiexec"):
            if found := shutil.which(name, path=path):
                return found
    return None


def _library_of(command: str, flavour: str) -> str:
    """Return the libmpi beside a launcher, so that mpi4py loads the same MPI."""
    prefix = Path(command).parent.parent
    names = {"openmpi": ["libmpi.so.40", "libmpi.so"], "mpich": ["libmpi.so.12", "libmpi.so"]}
    for folder in ("lib", "lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu"):
        for name in names[flavour]:
            path = prefix / folder / name
            if path.exists() and prefix != Path("/usr"):
                return str(path)
    return ""
