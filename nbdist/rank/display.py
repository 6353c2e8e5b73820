"""IPython's display on a rank, sent over the link instead of a Jupyter socket (rank)."""

from __future__ import annotations

from typing import Any

from ipykernel.jsonutil import encode_images, json_clean
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher

from nbdist.rank.output import CellOutput

__all__ = ["LinkDisplayPublisher", "LinkDisplayHook"]


class LinkDisplayPublisher(DisplayPublisher):
    """Publishes `display(...)` of any rich object, its updates and `clear_output`."""

    output: CellOutput

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        source: Any = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **_ignored: Any,
    ) -> None:
        """Send one mime bundle; `transient` carries the display id."""
        del source
        content = {
            "data": json_clean(encode_images(data)),
            "metadata": json_clean(metadata or {}),
            "transient": json_clean(transient or {}),
        }
        self.output.display("update_display_data" if update else "display_data", content)

    def set_parent(self, parent: dict[str, Any]) -> None:
        """Ignore ipykernel's request headers: the link knows which cell runs."""

    def clear_output(self, wait: bool = False) -> None:
        """Clear this rank's output, at once or when the next piece arrives."""
        self.output.display("clear_output", {"wait": wait})


class LinkDisplayHook(DisplayHook):
    """Sends the value of a cell's last expression."""

    output: CellOutput

    def set_parent(self, parent: dict[str, Any]) -> None:
        """Ignore ipykernel's request headers: the link knows which cell runs."""

    def write_output_prompt(self) -> None:
        """Write no prompt: the client labels the value with its rank."""

    def write_format_data(
        self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None
    ) -> None:
        """Send the value's mime bundle."""
        if format_dict:
            content = {
                "data": json_clean(encode_images(format_dict)),
                "metadata": json_clean(md_dict or {}),
                "execution_count": self.prompt_count,
            }
            self.output.display("execute_result", content)

    def finish_displayhook(self) -> None:
        """Leave stdout alone: there is no line to finish."""
        self._is_active = False
