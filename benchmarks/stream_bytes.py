"""Bytes that a kernel sends to the front end for what its ranks print, against `%%px`.

Counted are the messages on iopub as a front end gets them: the text in them, and the whole
messages as JSON with their headers. `text` is what all ranks wrote, `labelled` what it would be
with a label such as `[0] ` on each line of each rank.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from jupyter_client.manager import KernelManager

CASES = {
    "short lines": "for i in range(2000): print(rank, i)",
    "lines of 40": "for i in range(2000): print(f'rank {rank} step {i:5} ' + 'loss 0.123456 ' * 2)",
    "1 MB": "for i in range(4900): print(f'{rank} {i:6}', 'x' * 91)",
    "equal lines": "for i in range(2000): print(f'step {i:5} ' + 'x' * 29)",
    "tqdm": "import time, tqdm\nfor _ in tqdm.tqdm(range(1000)): time.sleep(0.003)",
    "10 MB": "for i in range(50_000): print(f'{rank} {i:6}', 'x' * 91)",
}
SETUP = """
import os, ipyparallel as ipp
from nbdist.cluster.mpi import find_launcher
os.environ.update(find_launcher().environment())
cluster = ipp.Cluster(engines="mpi", n={n}, delay=0.0, log_level=40,
    controller_args=["--HeartMonitor.period=200", "--IPController.use_threads=True", "--nodb"])
client = cluster.start_and_connect_sync(activate=True)
client[:].scatter("rank", range({n}), flatten=True, block=True)
"""
COUNT = """
import contextlib, io
with contextlib.redirect_stdout(io.StringIO()) as _count, contextlib.redirect_stderr(_count):
    exec({source!r})
num_bytes = len(_count.getvalue().encode())
num_lines = max(_count.getvalue().count("\\n"), 1)
"""


class Kernel:
    """A kernel, and the bytes that it sends for a cell."""

    def __init__(self) -> None:
        self.manager = KernelManager()
        command = [sys.executable, "-W", "ignore", "-m", "ipykernel_launcher", "-f"]
        self.manager.kernel_cmd = [*command, "{connection_file}"]
        self.manager.start_kernel()
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(60)

    def run(self, source: str) -> dict[str, float]:
        """Return bytes of text, bytes of whole messages, their number, and seconds."""
        started, text, whole, messages = time.perf_counter(), 0, 0, 0
        sent = self.client.execute(source)
        while True:
            message = self.client.get_iopub_msg(timeout=600)
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != sent:
                continue
            if kind == "error":
                raise RuntimeError(f"{source[:60]!r} failed: {content['evalue']}")
            if kind == "status" and content["execution_state"] == "idle":
                break
            if kind in ("stream", "display_data", "update_display_data", "execute_result"):
                shown = content.get("text", "") or content["data"].get("text/plain", "")
                text += len(shown.encode())
                whole += len(json.dumps(message, default=str))
                messages += 1
        self.client.get_shell_msg(timeout=10)
        seconds = time.perf_counter() - started
        return {"text": text, "whole": whole, "messages": messages, "seconds": seconds}

    def value(self, name: str) -> list[int]:
        """Return the ranks' values of a number, in rank order."""
        lines: list[str] = []
        sent = self.client.execute(
            f"%distributed pull {name} --as _{name}\nprint(*_{name}.values())"
        )
        while True:
            message = self.client.get_iopub_msg(timeout=60)
            if message["parent_header"].get("msg_id") != sent:
                continue
            if message["msg_type"] == "stream":
                lines.append(message["content"]["text"])
            elif message["content"].get("execution_state") == "idle":
                self.client.get_shell_msg(timeout=10)
                return [int(word) for word in "".join(lines).split()]

    def close(self) -> None:
        """End the kernel."""
        self.client.stop_channels()
        self.manager.shutdown_kernel()


def measure(num_ranks: int, cases: list[str], *, with_px: bool) -> list[dict[str, object]]:
    """Return one row a case and way."""
    kernel, rows = Kernel(), []
    try:
        kernel.run(f"%load_ext nbdist\n%distributed start -n {num_ranks}")
        if with_px:
            kernel.run(SETUP.format(n=num_ranks))
        for case in cases:
            source = CASES[case]
            kernel.run("%%distributed\n" + COUNT.format(source=source))
            written = sum(kernel.value("num_bytes"))
            labelled = written + 4 * sum(kernel.value("num_lines"))
            ways = {"nbdist": "%%distributed\n"}
            if with_px and case != "10 MB":
                ways["px"] = "%%px\n"
            for way, header in ways.items():
                sent = kernel.run(header + source)
                rows.append({"case": case, "way": way, "written": written, **sent,
                             "ratio": sent["text"] / written,
                             "labelled_ratio": sent["text"] / labelled,
                             "whole_ratio": sent["whole"] / written})  # fmt: skip
        kernel.run("%distributed stop")
        if with_px:
            kernel.run("client.close(); cluster.stop_cluster_sync()")
    finally:
        kernel.close()
    return rows


def main() -> None:
    """Print the table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--no-px", action="store_true", help="leave ipyparallel's %%px out")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    rows = measure(options.ranks, options.cases, with_px=not options.no_px)
    if options.json:
        print(json.dumps({"benchmark": "stream_bytes", "ranks": options.ranks, "rows": rows}))
        return
    print(f"{options.ranks} ranks; wanted: text at most 1.2 times what the ranks wrote")
    print(f"{'case':<12} {'way':>7} {'written':>10} {'text':>6} {'labelled':>9} {'whole':>6} "
          f"{'messages':>9} {'seconds':>8}")  # fmt: skip
    for row in rows:
        print(f"{row['case']:<12} {row['way']:>7} {row['written']:>10,} {row['ratio']:6.2f} "
              f"{row['labelled_ratio']:9.2f} {row['whole_ratio']:6.2f} {row['messages']:>9} "
              f"{row['seconds']:8.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
