"""Chat templates that take less than ours, each as strict as one that public models have."""

from typing import Final

_BODY: Final = """
{%- for message in messages %}
  {{- "[" ~ message.role ~ "]" ~ (message.content or "") }}
  {%- for call in message.tool_calls or [] %}
    {{- "<tool_call>" ~ call.function.name ~ (call.function.arguments|tojson) ~ "</tool_call>" }}
  {%- endfor %}
{%- endfor %}"""

ONE_CALL: Final = (
    """
{%- for message in messages %}
  {%- if message.tool_calls is defined and message.tool_calls|length != 1 %}
    {{- raise_exception("one tool call a message") }}
  {%- endif %}
{%- endfor %}"""
    + _BODY
)
"""One tool call a message, as Llama 3's."""

ITEMS: Final = """
{%- for message in messages %}
  {{- "[" ~ message.role ~ "]" ~ (message.content or "") }}
  {%- for call in message.tool_calls or [] %}
    {%- for name, value in call.function.arguments|items %}
      {{- name ~ "=" ~ (value if value is string else value|tojson) ~ ";" }}
    {%- endfor %}
  {%- endfor %}
{%- endfor %}"""
"""Writes arguments one by one, as the templates of Qwen3-Coder and GLM do."""

NO_TOOLS: Final = (
    """
{%- for message in messages %}
  {%- if (message.role == "user") != (loop.index0 % 2 == 0) %}
    {{- raise_exception("roles must alternate user/assistant") }}
  {%- endif %}
{%- endfor %}"""
    + _BODY
)
"""No system messages and no tools, as Gemma's."""

KNOWN_CALLS: Final = (
    """
{%- set known = namespace(ids=[]) %}
{%- for message in messages %}
  {%- for call in message.tool_calls or [] %}{%- set known.ids = known.ids + [call.id] %}{%- endfor %}
  {%- if message.role == "tool" and message.tool_call_id not in known.ids %}
    {{- raise_exception("a tool answers a call that nobody made") }}
  {%- endif %}
{%- endfor %}"""
    + _BODY
)
"""Each tool message answers a call, as in Mistral's."""

THOUGHTS: Final = """
{%- for message in messages %}
  {%- if message.role == "assistant" and "</think>" in message.content %}
    {{- message.content.split("</think>")[1].lstrip() }}
  {%- else %}
    {{- "[" ~ message.role ~ "]" ~ message.content }}
  {%- endif %}
  {%- for call in message.tool_calls or [] %}{{- call.function.arguments.a + 1 }}{%- endfor %}
{%- endfor %}"""
"""Drops thoughts, as Qwen3's, and fails for arguments of any other kind than it expects."""

TEMPLATES: Final = {
    "own": None,
    "one call": ONE_CALL,
    "items": ITEMS,
    "no tools": NO_TOOLS,
    "known calls": KNOWN_CALLS,
    "thoughts": THOUGHTS,
}
"""All of them by name; None is the tokenizer's own."""
