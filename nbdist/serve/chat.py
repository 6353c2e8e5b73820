"""A chat as one prompt, by the template of a model (client; torch-free)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

__all__ = ["ChatTemplate", "renderer"]

Turns: TypeAlias = list[dict[str, str]]
ChatTemplate: TypeAlias = str | Callable[[Turns], str]

_PLAIN = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)


def renderer(template: ChatTemplate | None) -> Callable[[Turns], str]:
    """Return what makes a prompt of turns, each with `role` and `content`.

    Args:
        template: a Jinja text, such as a tokenizer's `chat_template`, run in a sandbox; or a
            function; or None for lines of `role: content`.
    """
    if callable(template):
        return template
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    compiled = environment.from_string(_PLAIN if template is None else template)
    return lambda turns: compiled.render(
        messages=turns, add_generation_prompt=True, bos_token="", eos_token=""
    )
