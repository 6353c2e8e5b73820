"""Auto mode: cells run on the ranks without a header (client)."""

from __future__ import annotations

from typing import Any

__all__ = ["AutoMode"]

STAYS_LOCAL = ("%%", "%distributed", "%load_ext", "%reload_ext", "%unload_ext", "?")


class AutoMode:
    """An input transformer of IPython; callable on the lines of a cell.

    While it is on, a cell gets the header `%%distributed` unless its first line says where it
    runs. A cell that begins with `%%local` runs in the notebook's own process, on or off.
    """

    def __init__(self, shell: Any) -> None:
        self.is_on = False
        shell.input_transformers_cleanup.append(self)

    def __call__(self, lines: list[str]) -> list[str]:
        """Return the lines to run."""
        first = next((i for i, line in enumerate(lines) if line.strip()), None)
        if first is None:
            return lines
        head = lines[first].strip()
        if head == "%%local":
            return lines[first + 1 :]
        if not self.runs_on_ranks(lines):
            return lines
        return ["%%distributed\n", *lines]

    def runs_on_ranks(self, lines: list[str]) -> bool:
        """Return whether auto mode sends a cell of these lines to the ranks."""
        head = next((line.strip() for line in lines if line.strip()), "")
        return self.is_on and bool(head) and not head.startswith(STAYS_LOCAL)

    def remove(self, shell: Any) -> None:
        """Take the transformer out of the shell."""
        if self in shell.input_transformers_cleanup:
            shell.input_transformers_cleanup.remove(self)
