"""Time of a cell as a front end sees it: `%%distributed` against ipyparallel's `%%px`.

One real ipykernel drives both, with as many MPI engines each; the two take turns, cell by cell.
A local `pass` in the same kernel is the floor that no extension can go below.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

from jupyter_client.manager import KernelManager

CELLS = {"pass": "pass", "print": "print('x')"}
SETUP = """
import os, ipyparallel as ipp
from nbdist.cluster.mpi import find_launcher
os.environ.update(find_launcher().environment())
cluster = ipp.Cluster(engines="mpi", n={n}, delay=0.0, log_level=40,
    controller_args=["--HeartMonitor.period=200", "--IPController.use_threads=True", "--nodb"])
client = cluster.start_and_connect_sync(activate=True)
"""


class Kernel:
    """A kernel and the time that a front end waits for a cell."""

    def __init__(self) -> None:
        self.manager = KernelManager()
        command = [sys.executable, "-W", "ignore", "-m", "ipykernel_launcher", "-f"]
        self.manager.kernel_cmd = [*command, "{connection_file}"]
        self.manager.start_kernel()
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(60)

    def run(self, source: str) -> float:
        """Return seconds from sending a cell to its idle status."""
        started = time.perf_counter()
        sent = self.client.execute(source)
        while True:
            message = self.client.get_iopub_msg(timeout=120)
            content = message["content"]
            if message["parent_header"].get("msg_id") != sent:
                continue
            if message["msg_type"] == "error":
                raise RuntimeError(f"{source!r} failed: {content['evalue']}")
            if message["msg_type"] == "status" and content["execution_state"] == "idle":
                seconds = time.perf_counter() - started
                self.client.get_shell_msg(timeout=10)
                return seconds

    def close(self) -> None:
        """End the kernel."""
        self.client.stop_channels()
        self.manager.shutdown_kernel()


def measure(num_ranks: int, repeats: int) -> list[dict[str, object]]:
    """Return one row a kind of cell."""
    kernel = Kernel()
    rows = []
    try:
        kernel.run(f"%load_ext nbdist\n%distributed start -n {num_ranks}")
        kernel.run(SETUP.format(n=num_ranks))
        for name, source in CELLS.items():
            times: dict[str, list[float]] = {"local": [], "px": [], "nbdist": []}
            headers = {"local": "", "px": "%%px\n", "nbdist": "%%distributed\n"}
            for turn in range(repeats + 5):
                for which, header in headers.items():
                    seconds = kernel.run(header + source)
                    if turn >= 5:
                        times[which].append(seconds * 1000)
            medians = {which: statistics.median(values) for which, values in times.items()}
            ratio = medians["nbdist"] / medians["px"]
            rows.append({"ranks": num_ranks, "cell": name, **medians, "ratio": ratio})
        kernel.run("%distributed stop")
        kernel.run("client.close(); cluster.stop_cluster_sync()")
    finally:
        kernel.close()
    return rows


def main() -> None:
    """Print the table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=100, help="cells of each kind and way")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    rows = [row for n in options.ranks for row in measure(n, options.repeats)]
    if options.json:
        print(json.dumps({"benchmark": "cell_latency", "unit": "ms", "rows": rows}))
        return
    print("median ms of a cell, front end to front end; wanted: ratio at most 0.70")
    print(f"{'ranks':>5} {'cell':>6} {'local':>7} {'%%px':>7} {'nbdist':>7} {'ratio':>6}")
    for row in rows:
        numbers = "".join(f" {row[k]:7.2f}" for k in ("local", "px", "nbdist"))
        print(f"{row['ranks']:>5} {row['cell']:>6}{numbers} {row['ratio']:6.2f}")


if __name__ == "__main__":
    main()
