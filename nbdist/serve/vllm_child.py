"""The rank's end of vLLM's process: starts it, asks it, ends it (rank)."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from nbdist.errors import ServeError

__all__ = ["Child", "VllmProcessError"]

_CLOSE_SECONDS = 10.0
_TAIL_LINES = 5

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, not two more
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",  # all it needs is in the directory
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # ranks share the cores
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_RAISE_ON_LOGIT_NANS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
# the rank's own place in its world, which vLLM would take for its own
_OF_THE_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class VllmProcessError(Exception):
    """vLLM's process has ended, or says that it cannot go on."""


class Child:
    """A process that runs vLLM; it ends with `close`, or when this process does.

    Args:
        device: of the model; on CUDA the process sees this one only.

    Raises:
        ServeError: vLLM is not installed here.
    """

    def __init__(self, device: torch.device) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ServeError(
                "engine='vllm' was asked for, and there is no `vllm` package beside "
                f"{sys.executable}; `pip install 'nbdist[vllm]'` there on every rank, or serve "
                "with engine='native'"
            )
        # what vLLM leaves goes with it, however it ends
        self._folder = tempfile.TemporaryDirectory(prefix="nbdist-vllm-")
        self._log = Path(self._folder.name, "log")
        own, theirs = socket.socketpair()
        with theirs, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "nbdist.serve.vllm_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=_environment(device) | {"TMPDIR": self._folder.name},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # an interrupt of the cell is not its affair
            )
        with own:
            self._lines = own.makefile("rw", encoding="utf-8")

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message and return its answer; blocks until it is there.

        Raises:
            VllmProcessError: there is no answer, or the process says that it failed.
        """
        line = ""
        with contextlib.suppress(OSError, ValueError):  # closed, at one end or the other
            self._lines.write(json.dumps(message) + "\n")
            self._lines.flush()
            line = self._lines.readline()
        if not line:
            raise VllmProcessError(f"vLLM's process has ended: {self._tail()}")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise VllmProcessError(f"vLLM failed by {answer['failed']}")
        return answer

    def close(self) -> None:
        """End the process and wait for it; nothing happens the second time."""
        with contextlib.suppress(OSError):
            self._lines.close()
        self._process.terminate()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def _tail(self) -> str:
        """Return the last lines that it wrote."""
        with contextlib.suppress(FileNotFoundError):
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
            return " | ".join(lines[-_TAIL_LINES:]) or "it wrote nothing"
        return "it was closed"


def _environment(device: torch.device) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name not in _OF_THE_RANK}
    env |= _ENVIRONMENT | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    if device.type == "cuda":
        visible = env.get("CUDA_VISIBLE_DEVICES", "").split(",")
        index = device.index or 0
        env["CUDA_VISIBLE_DEVICES"] = (
            visible[index] if index < len(visible) and visible[0] else str(index)
        )
    return env
