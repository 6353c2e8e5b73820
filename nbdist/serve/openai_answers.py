"""Generations in the form that OpenAI's clients read (client; torch-free)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbdist.messages import TokenLogprob
    from nbdist.serve.generation import Generation

__all__ = ["Form", "error_body", "usage_of"]


class Form:
    """How the answers of one request look: those of completions or of chats.

    Args:
        chat: whether it is a chat.
        model: name of the model.
        request_id: of the first generation.
    """

    def __init__(self, model: str, request_id: str, *, chat: bool) -> None:
        self._chat = chat
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, generations: list[Generation]) -> dict[str, Any]:
        """Return the answer to a request without `stream`."""
        kind = "chat.completion" if self._chat else "text_completion"
        choices = [self._choice(index, g) for index, g in enumerate(generations)]
        return {**self._head, "object": kind, "choices": choices, "usage": usage_of(generations)}

    def piece(
        self, index: int, text: str, finish_reason: str | None, logprobs: list[TokenLogprob]
    ) -> dict[str, Any]:
        """Return one event of a stream."""
        choice: dict[str, Any] = {"index": index, "finish_reason": finish_reason}
        if self._chat:
            choice["delta"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        choice["logprobs"] = self._logprobs(logprobs) if logprobs else None
        return {**self._head, "object": self._chunk, "choices": [choice]}

    def usage(self, generations: list[Generation]) -> dict[str, Any]:
        """Return the last event of a stream that was asked for its usage."""
        return {
            **self._head,
            "object": self._chunk,
            "choices": [],
            "usage": usage_of(generations),
        }

    @property
    def _chunk(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _choice(self, index: int, generation: Generation) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": generation.finish_reason}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": generation.text}
        else:
            choice["text"] = generation.text
        seen = generation.logprobs
        choice["logprobs"] = self._logprobs(seen) if seen else None
        return choice

    def _logprobs(self, seen: list[TokenLogprob]) -> dict[str, Any]:
        if not self._chat:
            return {
                "tokens": [one.text for one in seen],
                "token_logprobs": [one.logprob for one in seen],
                "top_logprobs": [
                    dict(zip(one.top_texts, one.top_logprobs, strict=True)) for one in seen
                ],
                "text_offset": [],
            }
        return {
            "content": [
                {
                    **_entry(one.text, one.logprob),
                    "top_logprobs": [
                        _entry(text, logprob)
                        for text, logprob in zip(one.top_texts, one.top_logprobs, strict=True)
                    ],
                }
                for one in seen
            ]
        }


def usage_of(generations: list[Generation]) -> dict[str, int]:
    """Return the tokens of prompts and answers."""
    prompt = sum(generation.num_prompt_tokens for generation in generations)
    made = sum(generation.num_tokens for generation in generations)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def error_body(message: str, kind: str) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}
