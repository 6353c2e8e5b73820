"""Real worlds: one of two ranks and one of three, shared by the tests of a module."""

from __future__ import annotations

import queue
import sys
import time
from dataclasses import dataclass, field

import pytest
from jupyter_client.manager import KernelManager

from nbdist import World


@pytest.fixture(scope="session", autouse=True)
def _own_run_dir(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBDIST_RUN_DIR", str(tmp_path_factory.mktemp("run")))
        yield


@pytest.fixture(scope="module")
def world():
    """A world of two ranks whose tests leave no rank dead."""
    with World.start(2) as started:
        yield started


@pytest.fixture(scope="module")
def world3():
    """A world of three ranks."""
    with World.start(3) as started:
        yield started


@pytest.fixture
def own_world():
    """A world of two ranks for one test, which may break it."""
    with World.start(2) as started:
        yield started


@dataclass
class Cell:
    """What a front end saw of a cell."""

    status: str = ""
    seconds: float = 0.0
    out: str = ""
    err: str = ""
    ename: str = ""
    evalue: str = ""
    traceback: str = ""
    displays: list[dict] = field(default_factory=list)


class Notebook:
    """A kernel as a front end drives it."""

    def __init__(self) -> None:
        self.manager = KernelManager()
        self.manager.kernel_cmd = [
            sys.executable, "-W", "ignore", "-m", "ipykernel_launcher", "-f", "{connection_file}",
        ]  # fmt: skip
        self.manager.start_kernel()
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(60)

    def send(self, source: str, *, allow_stdin: bool = True) -> str:
        return self.client.execute(source, allow_stdin=allow_stdin)

    def wait(self, message_id: str, timeout_seconds: float = 60.0) -> Cell:
        cell, started = Cell(), time.monotonic()
        while True:
            message = self.client.get_iopub_msg(timeout=timeout_seconds)
            if message["parent_header"].get("msg_id") != message_id:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                name = "out" if content["name"] == "stdout" else "err"
                setattr(cell, name, getattr(cell, name) + content["text"])
            elif kind in ("display_data", "execute_result", "update_display_data"):
                cell.displays.append(content["data"])
            elif kind == "error":
                cell.ename, cell.evalue = content["ename"], content["evalue"]
                cell.traceback = "\n".join(content["traceback"])
            elif kind == "status" and content["execution_state"] == "idle":
                break
        cell.seconds = time.monotonic() - started
        while (reply := self.client.get_shell_msg(timeout=10))["parent_header"][
            "msg_id"
        ] != message_id:
            pass
        cell.status = reply["content"]["status"]
        return cell

    def run(self, source: str, timeout_seconds: float = 60.0) -> Cell:
        return self.wait(self.send(source), timeout_seconds)

    def wait_for_text(self, text: str, timeout_seconds: float = 30.0) -> None:
        """Wait until a stream message shows this text."""
        seen, deadline = "", time.monotonic() + timeout_seconds
        while text not in seen:
            try:
                message = self.client.get_iopub_msg(timeout=deadline - time.monotonic())
            except queue.Empty:
                raise AssertionError(f"{text!r} did not appear; seen: {seen!r}") from None
            if message["msg_type"] == "stream":
                seen += message["content"]["text"]

    def wait_for_prompt(self, timeout_seconds: float = 60.0) -> tuple[str, bool]:
        """Wait for an input request; return its prompt and whether it is for a password."""
        content = self.client.get_stdin_msg(timeout=timeout_seconds)["content"]
        return content["prompt"], content["password"]

    def type(self, line: str) -> None:
        self.client.input(line)

    def close(self) -> None:
        self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel()
        self.manager.cleanup_resources()


@pytest.fixture
def bare_notebook():
    """A kernel without a world."""
    opened = Notebook()
    assert opened.run("%load_ext nbdist").status == "ok"
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def notebook():
    """A kernel with a world of two ranks whose tests leave no rank dead."""
    opened = Notebook()
    assert opened.run("%load_ext nbdist").status == "ok"
    started = opened.run("%distributed start -n 2")
    assert started.status == "ok", started
    yield opened
    opened.run("%distributed stop")
    opened.close()
