"""How a question becomes a prompt: system prompt, template, chat or plain text.

Small models live and die by this, so it is the environment's to say and is written into every run's
configuration. The chat template itself belongs to the model and is applied by the completer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lockstep.core.completer import Message
from lockstep.core.errors import ConfigError

_SLOT = "{question}"


@dataclass(frozen=True, kw_only=True)
class PromptConfig:
    """How questions are posed."""

    style: Literal["chat", "text"] = "chat"
    """chat: messages through the model's chat template; text: continued verbatim (base models)."""
    system_prompt: str = ""
    """First message of a chat, or first paragraph of a text; empty means none of ours."""
    template: str = _SLOT
    """What the model reads; {question} is where the question goes."""

    def __post_init__(self) -> None:
        if self.template.count(_SLOT) != 1:
            raise ConfigError(
                f"prompt template must contain {_SLOT} once, got {self.template.count(_SLOT)} times"
            )

    def render(self, question: str | Sequence[Message]) -> tuple[Message, ...] | str:
        """The prompt for `question`; messages given as such keep their own system message."""
        if isinstance(question, str):
            text = self.template.replace(_SLOT, question)
            if self.style == "text":
                return f"{self.system_prompt}\n\n{text}" if self.system_prompt else text
            question = [{"role": "user", "content": text}]
        elif self.style == "text":
            raise ConfigError("prompt style 'text' needs text prompts, but this item has messages")
        if self.system_prompt and question[0].get("role") != "system":
            question = [{"role": "system", "content": self.system_prompt}, *question]
        return tuple(question)
