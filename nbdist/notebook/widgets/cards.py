"""A request as the page shows it: one card each (client)."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbdist.serve.generation import Generation

__all__ = ["Card", "Slip", "note_places", "text_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a card shows. `state` is `queued`, `running` or a finish reason."""

    id: str
    number: int
    prompt: str
    text: str = ""
    state: str = "queued"
    detail: str = ""
    rank: int = -1
    batch_size: int = 0
    num_tokens: int = 0
    tokens_per_second: float | None = None
    first_token_seconds: float | None = None

    def to_page(self) -> dict[str, Any]:
        """Return the card as JSON for the page."""
        return dataclasses.asdict(self)


@dataclass(slots=True)
class Slip:
    """A card in the making: what was asked, and the generation once a router has taken it."""

    id: str
    number: int
    prompt: str
    generation: Generation | None = None
    refused: str = ""
    state: str = "queued"
    num_shown: int = 0
    changed: bool = True
    place: str = ""
    sent_at: float = field(default_factory=time.monotonic)

    @property
    def ended(self) -> bool:
        """Whether nothing about it changes any more."""
        if self.generation is not None:
            return self.generation.finish_reason is not None
        return self.state != "queued"

    def card(self) -> Card:
        """Return how it looks now."""
        g = self.generation
        if g is None:
            return Card(
                id=self.id,
                number=self.number,
                prompt=self.prompt,
                state=self.state,
                detail=self.refused,
            )
        return Card(
            id=self.id,
            number=self.number,
            prompt=self.prompt,
            # first the ending, then the text: text that comes in between is then not lost
            state=g.finish_reason or ("running" if g.num_tokens else "queued"),
            text=g.text,
            detail=g.detail or self.place,
            rank=g.rank,
            batch_size=g.batch_size,
            num_tokens=g.num_tokens,
            tokens_per_second=g.tokens_per_second,
            first_token_seconds=g.first_token_seconds,
        )

    def delta(self) -> dict[str, Any]:
        """Return the card for the page with only the text since the last call.

        `start` is the number of characters that the page has of it, `size` the number it has then.
        """
        self.changed = False  # before the look, so that what comes meanwhile is sent next time
        card = self.card()
        page = card.to_page()
        page["start"], page["size"] = self.num_shown, len(card.text)
        page["text"] = card.text[self.num_shown :]
        self.num_shown = len(card.text)
        return page


def note_places(slips: list[Slip], now: float) -> None:
    """Say of each request that has not begun how many wait before it, and about how long.

    The time follows from how many have begun since the first was sent; it is a guess.

    Args:
        slips: of one panel, in the order of sending.
        now: monotonic seconds.
    """
    waiting: dict[int, int] = {}
    begun = sum(1 for slip in slips if slip.generation is not None and slip.generation.num_tokens)
    spent = now - min((slip.sent_at for slip in slips), default=now)
    for slip in slips:
        place, g = "", slip.generation
        if g is not None and not slip.ended and not g.num_tokens:
            ahead = waiting.get(g.rank, 0)
            waiting[g.rank] = ahead + 1
            place = f"{ahead} before it" if ahead else "next"
            if begun:
                place += f", in about {max(1, round((ahead + 1) * spent / begun))} s"
        if place != slip.place:
            slip.place, slip.changed = place, True


def text_of(cards: list[Card]) -> str:
    """Return cards as plain text, for places without widgets."""
    lines = []
    for card in cards:
        facts = [card.state]
        if card.num_tokens:
            facts.append(f"{card.num_tokens} tokens")
        if card.tokens_per_second is not None:
            facts.append(f"{card.tokens_per_second:.1f} tokens/s")
        if card.rank >= 0:
            facts.append(f"rank {card.rank}")
        lines.append(f"[{card.number}] {', '.join(facts)}\n{card.prompt}{card.text}")
        if card.detail:
            lines.append(card.detail)
    return "\n".join(lines)
