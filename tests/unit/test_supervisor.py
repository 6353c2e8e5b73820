"""The parent of a rank reports its end, and ends with whatever has started it."""

import json
import signal
import subprocess
import sys

import psutil
import pytest

# A stand-in for the rank: `main` of the engine, that tells its pid and does as it is told.
SCRIPT = """
import sys, types, os
act = sys.argv.pop()
engine = types.ModuleType("nbdist.rank.engine")
def main():
    print(os.getpid(), flush=True)
    exec(act)
engine.main = main
sys.modules["nbdist.rank.engine"] = engine
from nbdist.rank import supervisor
supervisor.main()
"""


def start(directory, act, *place):
    (directory / "ranks").mkdir()
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(directory), "2", *place, act],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    return child, int(child.stdout.readline())


def report(directory, pid):
    return json.loads((directory / "ranks" / f"{pid}.exit").read_text())


@pytest.mark.parametrize(
    ("act", "signum", "code"),
    [
        ("os._exit(3)", 0, 3),
        ("sys.exit(4)", 0, 4),
        ("raise ValueError", 0, 1),
        ("pass", 0, 0),
        ("os.kill(os.getpid(), 9)", 9, 0),
        ("os.abort()", 6, 0),
    ],
)
def test_supervisor_reports_signal_and_code_and_ends_alike(tmp_path, act, signum, code):
    child, pid = start(tmp_path, act)
    child.communicate(timeout=20)
    found = report(tmp_path, pid)
    assert (found["signal"], found["code"]) == (signum, code)
    # Of a rank that never came up the launcher hears.
    assert child.returncode == (128 + signum if signum else code)
    assert 1 << 20 < found["peak_bytes"] < found["memory_bytes"]
    assert found["num_oom_kills"] >= 0


def test_supervisor_of_a_rank_among_others_stays_with_its_launcher(tmp_path):
    child, pid = start(tmp_path, "input(); os._exit(3)")
    (tmp_path / "ranks" / "1.json").write_text(json.dumps({"rank": 1, "pid": pid}))
    with pytest.raises(subprocess.TimeoutExpired):
        child.communicate("\n", timeout=1)
    assert report(tmp_path, pid)["code"] == 3
    child.terminate()
    child.communicate(timeout=5)
    assert child.returncode == -signal.SIGTERM


def test_supervisor_of_a_rank_alone_ends_in_peace(tmp_path):
    child, pid = start(tmp_path, "input(); os._exit(3)", "1", "1")
    (tmp_path / "ranks" / "1.json").write_text(json.dumps({"rank": 1, "pid": pid}))
    child.communicate("\n", timeout=20)
    assert report(tmp_path, pid)["code"] == 3
    assert child.returncode == 0


def test_rank_ends_with_its_supervisor(tmp_path):
    child, pid = start(tmp_path, "import time; time.sleep(60)")
    rank = psutil.Process(pid)
    child.kill()
    child.communicate()
    _, alive = psutil.wait_procs([rank], timeout=5)
    assert alive == []
