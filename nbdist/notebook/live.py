"""Text in a place of its own under a cell, replaced while the cell runs (client)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

__all__ = ["LiveText", "Publish"]

Publish = Callable[[str, dict[str, Any], str], None]
"""Shows a display: action, content, label of its ranks."""


class LiveText:
    """One display that is updated; equal text is not sent again.

    Args:
        publish: shows a display.
        every_seconds: shortest time between updates that are not forced.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        publish: Publish,
        every_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._publish = publish
        self._every = every_seconds
        self._clock = clock
        self.forget()

    def forget(self) -> None:
        """Leave what is shown as it is, or was cleared; the next text gets a new place."""
        self._id = f"nbdist-{uuid.uuid4().hex[:12]}"
        self._at = float("-inf")
        self.text: str | None = None

    @property
    def is_due(self) -> bool:
        """Whether an update would be sent now."""
        return self._clock() - self._at >= self._every

    def show(self, text: str, *, force: bool = False) -> None:
        """Show text instead of what stands there."""
        if text == self.text or not (force or self.is_due):
            return
        action = "display_data" if self.text is None else "update_display_data"
        self.text, self._at = text, self._clock()
        content = {"data": {"text/plain": text}, "metadata": {}}
        self._publish(action, {**content, "transient": {"display_id": self._id}}, "")
