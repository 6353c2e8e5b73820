"""The launcher is found in the right order and described rightly."""

import os
import stat
from pathlib import Path

import pytest

from nbdist.cluster import mpi
from nbdist.errors import StartError


def make_launcher(folder: Path, version: str, name: str = "mpirun") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{version}'\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_launcher_on_path_goes_before_the_environments_own(tmp_path, monkeypatch):
    own = make_launcher(tmp_path / "venv" / "bin", "mpirun (Open MPI) 5.0.11")
    clusters = make_launcher(tmp_path / "cluster" / "bin", "mpirun (Open MPI) 4.1.4")
    monkeypatch.setattr(mpi.sys, "prefix", str(tmp_path / "venv"))
    path = f"{own.parent}{os.pathsep}{clusters.parent}"

    assert mpi.find_launcher(environment={"PATH": path}).command == str(clusters)
    assert mpi.find_launcher(environment={"PATH": str(own.parent)}).command == str(own)


def test_launcher_of_mpich_gets_no_switch_of_open_mpi(tmp_path):
    path = make_launcher(tmp_path, "HYDRA build details:\n    Version: 5.0.2", "mpiexec")

    launcher = mpi.find_launcher(str(path))

    assert (launcher.flavour, launcher.version) == ("mpich", "MPICH 5.0.2")
    assert launcher.arguments(3, ["prog"]) == [str(path), "-n", "3", "prog"]
    assert not any(name.startswith("OMPI") for name in launcher.environment())


def test_launcher_of_open_mpi_survives_a_dead_rank(tmp_path):
    path = make_launcher(tmp_path, "mpirun (Open MPI) 5.0.11")

    launcher = mpi.find_launcher(str(path))

    assert launcher.version == "Open MPI 5.0.11"
    assert "--enable-recovery" in launcher.arguments(2, ["prog"])
    assert launcher.environment()["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"


def test_library_beside_the_launcher_is_what_mpi4py_loads(tmp_path):
    path = make_launcher(tmp_path / "bin", "mpirun (Open MPI) 5.0.11")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libmpi.so.40").touch()

    environment = mpi.find_launcher(str(path)).environment()

    assert environment["MPI4PY_LIBMPI"] == str(tmp_path / "lib" / "libmpi.so.40")


def test_launcher_missing_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(mpi.sys, "prefix", str(tmp_path))
    with pytest.raises(StartError, match=r"no MPI launcher: .*pip install 'nbdist\[mpi\]'"):
        mpi.find_launcher(environment={"PATH": str(tmp_path)})


def test_launcher_that_is_no_mpi_is_refused(tmp_path):
    path = make_launcher(tmp_path, "my own script")
    with pytest.raises(StartError, match=r"is no Open MPI and no MPICH; .*my own script"):
        mpi.find_launcher(str(path))
