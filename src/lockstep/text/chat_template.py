"""Chat messages to prompt text, exactly as transformers renders them.

A chat template is a Jinja program that comes with the checkpoint, from a stranger: it runs in
Jinja's immutable sandbox. The environment (block trimming, `tojson` without HTML escapes,
`raise_exception`, `strftime_now`, loop controls, `{% generation %}`) is the one that templates
are written against; parity is tested in tests/text/test_chat_template.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, ExtensionAttribute
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lockstep.core.errors import CheckpointError, RequestError

Messages = Sequence[Mapping[str, Any]]

# What a template may raise while it runs, given messages of a shape it did not expect.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


@dataclass(frozen=True, kw_only=True)
class RenderedChat:
    """A rendered conversation and the character ranges (half-open) inside its `{% generation %}`
    blocks.
    """

    text: str
    generation_spans: tuple[tuple[int, int], ...]


class ChatTemplate:
    """One compiled template. `special_tokens` (`bos_token`, `eos_token`, ...) are visible to it
    by name.
    """

    def __init__(self, source: str, *, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"the chat template has a syntax error in line {error.lineno}: {error.message}"
            ) from error
        self.marks_generation = any(
            node.identifier == _GenerationBlocks.identifier
            for node in tree.find_all(ExtensionAttribute)
        )
        """Whether the template marks the assistant's words with `{% generation %}`."""

    def render(
        self,
        messages: Messages,
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt text. Raises RequestError where the template rejects or cannot handle the
        messages.
        """
        return self.render_with_spans(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
        ).text

    def render_with_spans(
        self,
        messages: Messages,
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> RenderedChat:
        """Like `render`, and where the assistant's words lie; no spans where the template marks
        none.
        """
        blocks: list[str] = []
        spans: list[tuple[int, int]] = []
        context = {
            **self._special_tokens,
            "documents": None,
            **variables,
            "messages": [_normalised(message) for message in messages],
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "add_generation_prompt": add_generation_prompt,
        }
        token = _open_rendering.set((blocks, spans))
        try:
            # Not list.extend: a generation block reads how much text precedes it.
            for block in self._template.generate(context):
                blocks.append(block)
        except _RENDER_ERRORS as error:
            raise RequestError(
                f"the chat template cannot render these messages: {error}", param="messages"
            ) from error
        finally:
            _open_rendering.reset(token)
        return RenderedChat(text="".join(blocks), generation_spans=tuple(spans))


_open_rendering: ContextVar[tuple[list[str], list[tuple[int, int]]] | None] = ContextVar(
    "open_rendering", default=None
)


class _GenerationBlocks(Extension):
    """`{% generation %}...{% endgeneration %}`: renders its body and notes where the text went."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = CallBlock(self.call_method("_render"), [], [], body)
        block.set_lineno(line)
        return block

    def _render(self, caller: Any) -> str:
        text: str = caller()
        if (rendering := _open_rendering.get()) is not None:
            blocks, spans = rendering
            start = sum(map(len, blocks))
            spans.append((start, start + len(text)))
        return text


def _normalised(message: Mapping[str, Any]) -> dict[str, Any]:
    """As transformers hands a message to a template: no keys that are None, reasoning under its
    usual name.
    """
    present = {key: value for key, value in message.items() if value is not None}
    for name in ("reasoning_content", "thinking", "reasoning"):
        if name in present:
            return {"thinking": present[name], **present, "reasoning_content": present[name]}
    return present


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes `<`, `>`, `&` and `'`, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
