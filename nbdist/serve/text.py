"""From token ids to text as they come: whole characters, no stop texts (rank; torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

__all__ = ["StopFilter", "TextStream"]


class StopFilter:
    """Passes text on up to the first stop text; what may become one is held back."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(stop)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that is safe to show, and whether a stop text was reached."""
        self._held += text
        found = [at for s in self._stop if (at := self._held.find(s)) >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        keep = max((_overlap(self._held, s) for s in self._stop), default=0)
        at = len(self._held) - keep
        shown, self._held = self._held[:at], self._held[at:]
        return shown, False

    def flush(self) -> str:
        """Return what is still held back, because no more text comes."""
        shown, self._held = self._held, ""
        return shown


class TextStream:
    """The text of one request; the pieces joined are what decoding all its tokens gives.

    A piece is empty while the last character is incomplete. Text is decoded as the continuation
    of the prompt, so a leading space survives tokenizers that drop it at the start of a text.

    Args:
        tokenizer: of the model.
        prompt_ids: tokens that come before; their text is not part of the pieces.
        stop: texts that end the request; neither they nor what follows is ever shown.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), stop: Sequence[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._prompt_ids = list(prompt_ids)
        self._ids: list[int] = []
        self._num_decoded = 0
        self._decoder = DecodeStream(ids=list(prompt_ids), skip_special_tokens=True)
        self._filter = StopFilter(stop)
        self._stopped = False

    def push(self, token_id: int) -> tuple[str, bool]:
        """Add a token; return the new text and whether a stop text was reached."""
        self._ids.append(token_id)
        piece = self._decoder.step(self._tokenizer, token_id) or ""
        self._num_decoded += len(piece)
        shown, self._stopped = self._filter.push(piece)
        return shown, self._stopped

    def flush(self) -> str:
        """Return the rest: held-back text, and a character that stayed incomplete."""
        if self._stopped:
            return ""
        before = len(self._decode(self._prompt_ids))
        rest = self._decode(self._prompt_ids + self._ids)[before + self._num_decoded :]
        self._num_decoded += len(rest)
        shown, self._stopped = self._filter.push(rest)
        return shown if self._stopped else shown + self._filter.flush()

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a start of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
