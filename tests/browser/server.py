"""A JupyterLab server of the tests' own: own port, own token, own settings, ended by its handle."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
START_SECONDS = 60.0
STOP_SECONDS = 15.0

# no news question, no look for updates, no saving behind the test's back; every cell is in the page
_SETTINGS = {
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/docmanager-extension:plugin": {"autosave": False},
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},
}


class LabServer:
    """A running JupyterLab that shows the files of `folder`."""

    def __init__(self, folder: Path, private: Path) -> None:
        self.folder = folder
        self.token = secrets.token_hex(16)
        self.log_path = private / "server.log"
        self._write_settings(private / "config")
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        options = {
            "ServerApp.ip": "127.0.0.1",
            "ServerApp.port": port,
            "ServerApp.port_retries": 0,
            "ServerApp.root_dir": folder,
            "ServerApp.open_browser": False,
            "ServerApp.allow_root": True,
            "IdentityProvider.token": self.token,
            "LabApp.expose_app_in_browser": True,
        }
        command = [sys.executable, "-m", "jupyterlab"]
        command += [f"--{name}={value}" for name, value in options.items()]
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=self._environment(private),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._wait_until_ready()

    def _write_settings(self, config: Path) -> None:
        place = config / "labconfig" / "default_setting_overrides.json"
        place.parent.mkdir(parents=True)
        place.write_text(json.dumps(_SETTINGS))

    def _environment(self, private: Path) -> dict[str, str]:
        names = {
            "JUPYTER_CONFIG_DIR": "config",
            "JUPYTER_DATA_DIR": "data",
            "JUPYTER_RUNTIME_DIR": "runtime",
            "IPYTHONDIR": "ipython",
        }
        own = {name: str(private / folder) for name, folder in names.items()}
        # kernels find nbdist in a checkout that is not installed, too
        paths = [str(CHECKOUT), os.environ.get("PYTHONPATH", "")]
        return {**os.environ, **own, "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                self.request("GET", "/api/status")
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.05)
        self.stop()
        raise AssertionError(f"JupyterLab did not start:\n{self.log_path.read_text()[-3000:]}")

    def request(self, method: str, path: str) -> bytes:
        """Call the server's REST interface; returns the body."""
        request = urllib.request.Request(
            self.url + path, method=method, headers={"Authorization": f"token {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.read()

    def end_sessions(self) -> None:
        """End every kernel; one outlives its browser tab and would serve the next test."""
        for session in json.loads(self.request("GET", "/api/sessions")):
            self.request("DELETE", f"/api/sessions/{session['id']}")

    def stop(self) -> None:
        """End the server and its process group; returns when it is gone."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
