"""What OpenAI's clients send, and how it becomes sampling (client; torch-free).

A field that is not here is refused by name: nothing that was asked for is ignored in silence.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["ChatRequest", "CompletionRequest", "Message", "StreamOptions"]


class StreamOptions(BaseModel):
    """What a stream brings beside text."""

    include_usage: bool = False


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    n: int = Field(default=1, ge=1, le=16)
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    user: str | None = None  # noted by nobody

    def _sampling(self, max_new_tokens: int, logprobs: int | None) -> dict[str, Any]:
        return {
            "max_new_tokens": max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "stop": self.stop or (),
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logprobs": logprobs,
        }


class CompletionRequest(_Request):
    """`POST /v1/completions`."""

    prompt: str | list[str]
    max_tokens: int = 16
    logprobs: int | None = None

    def sampling(self, context_length: int) -> dict[str, Any]:
        """Return the fields of `Sampling`."""
        return self._sampling(self.max_tokens, self.logprobs)

    def prompts(self) -> list[str]:
        """Return the texts to continue."""
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt


class Message(BaseModel):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str


class ChatRequest(_Request):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0

    def sampling(self, context_length: int) -> dict[str, Any]:
        """Return the fields of `Sampling`; without a limit the context is one."""
        most = self.max_completion_tokens or self.max_tokens or context_length
        return self._sampling(most, self.top_logprobs if self.logprobs else None)
