"""Parity with transformers, on templates in the style of the model families they stand for."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from lockstep.core.errors import CheckpointError, RequestError
from lockstep.text.chat_template import ChatTemplate
from lockstep.text.tokenizer import Tokenizer, TokenizerFiles

CHATML = """\
{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
{{ '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}
    {% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3 = """\
{{- bos_token }}
{%- set date = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{{- 'Today: ' ~ date ~ '\\n' ~ system ~ '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('one tool call at a time') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
        {%- continue %}
    {%- endif %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {{- message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{ tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages[::-1] %}
    {%- if ns.last_query < 0 and message.role == 'user' %}
        {%- set ns.last_query = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is string and loop.index0 > ns.last_query %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' ~ (call.function | tojson(indent=2)) ~ '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem is defined and loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

MISTRAL = """\
{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate user and assistant') }}
{% endif %}
{% if message['role'] == 'user' %}
[INST] {{ message['content'] }} [/INST]{% else %} {{ message['content'] }}{{ eos_token }}{% endif %}
{% endfor %}"""

MARKED = """\
{% for message in messages %}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
    {%- generation -%}
    {{- message.content + '<|im_end|>' }}
    {%- endgeneration -%}
{%- else %}
    {{- message.content + '<|im_end|>' }}
{%- endif %}
{{ '\\n' }}
{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "qwen": QWEN, "mistral": MISTRAL, "marked": MARKED}

TURNS = [
    {"role": "user", "content": 'What\'s 2 < 3 & "why"? é🙂'},
    {"role": "assistant", "content": " Because.\n"},
    {"role": "user", "content": "\n  spaced  "},
    {"role": "assistant", "content": "Done"},
]
SYSTEM = [{"role": "system", "content": "You are terse."}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Find <things> & more, naïve",
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
        },
    }
]
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "find", "arguments": {"q": "<é>"}}}],
}
TOOL_TURNS = [
    TURNS[0],
    CALL,
    {"role": "tool", "content": "42"},
    {"role": "tool", "content": "43"},
    {"role": "assistant", "content": "It is 42.", "reasoning": "So\n"},
]


@pytest.fixture(params=sorted(TEMPLATES))
def pair(request: pytest.FixtureRequest, byte_level: Tokenizer, tmp_path: Path) -> tuple[Any, Any]:
    """The same tokenizer with the same template, theirs and ours."""
    from transformers import PreTrainedTokenizerFast

    files = TokenizerFiles(
        tokenizer_json=byte_level.files.tokenizer_json,
        config=byte_level.files.config,
        chat_template=TEMPLATES[request.param],
    )
    ours = Tokenizer(files)
    ours.save(tmp_path)
    return PreTrainedTokenizerFast.from_pretrained(tmp_path), ours.chat_template


@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize(
    "messages",
    [TURNS, TURNS[:1], SYSTEM + TURNS, TOOL_TURNS],
    ids=["turns", "one", "system", "tool"],
)
def test_rendering_is_that_of_transformers(
    pair: tuple[Any, ChatTemplate], messages: list[dict[str, Any]], add_generation_prompt: bool
) -> None:
    theirs, ours = pair
    for options in ({}, {"enable_thinking": False}):
        arguments = {"add_generation_prompt": add_generation_prompt, "tools": TOOLS, **options}
        expected: str | None
        try:
            expected = theirs.apply_chat_template(messages, tokenize=False, **arguments)
        except Exception:  # transformers lets through whatever the template raised
            expected = None
        if expected is None:
            with pytest.raises(RequestError):
                ours.render(messages, **arguments)
        else:
            assert ours.render(messages, **arguments) == expected


def test_the_exceptions_above_are_few(byte_level: Tokenizer) -> None:
    """So that the parity test cannot pass by refusing everything."""
    for name, source in TEMPLATES.items():
        template = ChatTemplate(source, special_tokens=byte_level.special_tokens)
        assert "spaced" in template.render(TURNS), name


def test_generation_blocks_give_the_assistants_words() -> None:
    template = ChatTemplate(MARKED)
    assert template.marks_generation
    rendered = template.render_with_spans(SYSTEM + TURNS)
    assert rendered.text == template.render(SYSTEM + TURNS)
    words = [rendered.text[a:b] for a, b in rendered.generation_spans]
    assert words == [" Because.\n<|im_end|>", "Done<|im_end|>"]


def test_generation_spans_are_those_of_transformers() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    _, spans = render_jinja_template(
        [SYSTEM + TURNS], chat_template=MARKED, return_assistant_tokens_mask=True
    )
    ours = ChatTemplate(MARKED).render_with_spans(SYSTEM + TURNS)
    assert [tuple(span) for span in spans[0]] == list(ours.generation_spans)


def test_unmarked_templates_say_so() -> None:
    template = ChatTemplate("{# {% generation %} in a comment #}{{ messages[0].content }}")
    assert not template.marks_generation
    assert template.render_with_spans(TURNS).generation_spans == ()


def test_the_date_is_todays() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(TURNS) == str(datetime.now().year)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ messages[0].content + 1 }}", "cannot render"),
        ("{{ messages[9].content.strip() }}", "cannot render"),
        ("{{ messages.append(1) }}", "cannot render"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot render"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "cannot render"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "cannot render"),
    ],
)
def test_what_a_template_does_wrong_is_the_requests_error(source: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        ChatTemplate(source).render(TURNS)
    assert caught.value.param == "messages"


def test_a_syntax_error_is_the_checkpoints() -> None:
    with pytest.raises(CheckpointError, match="syntax error in line 2"):
        ChatTemplate("\n{% if %}")
