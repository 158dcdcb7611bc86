"""Grammars of replies: which ones they allow, which ones they refuse, and when there is none."""

import pytest

from vla_rl.models.language import CausalLanguageModel, TinyConfig, tiny
from vla_rl.models.language.grammars import reply_grammar
from vla_rl.types import (
    ANY_REPLY,
    ChoiceFormat,
    GrammarFormat,
    JsonFormat,
    RegexFormat,
    ReplyFormat,
    ReplyOptions,
    ToolRule,
    ToolSpec,
)

SHAPE = TinyConfig(hidden_size=32, num_layers=1, num_heads=1, intermediate_size=32, vocab_size=300)
SCHEMA = {
    "$defs": {"Number": {"type": "integer"}},
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/Number"}},
    "required": ["a"],
    "additionalProperties": False,
}
OPEN = {
    "type": "object",
    "properties": {"a": {"type": "object", "properties": {"b": {"enum": [{"properties": {}}, 1]}}}},
}
STRICT = ToolSpec(name="add", description="", parameters=SCHEMA, is_strict=True)
LOOSE = ToolSpec(
    name='m"ül', description="", parameters={"properties": {"x": {"not": {"type": "null"}}}}
)
ADD = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
MUL = '<tool_call>\n{"name":"m\\"ül","arguments":{"x":[1]}}\n</tool_call>'


@pytest.fixture(scope="module")
def policy() -> CausalLanguageModel:
    return tiny(SHAPE, ["a"], seed=0)


def allows(policy: CausalLanguageModel, options: ReplyOptions, text: str, *tools: ToolSpec) -> bool:
    grammar = policy.grammar(options, tools)
    assert grammar is not None
    try:
        policy.vocabulary.allowed_masks(
            grammar, [*policy.tokenize(text).tolist(), min(policy.stop_tokens)]
        )
    except ValueError as error:
        if "left its grammar" not in str(error):
            raise
        return False
    return True


def test_without_a_rule_there_is_no_grammar(policy: CausalLanguageModel) -> None:
    assert policy.grammar(ANY_REPLY, ()) is None
    assert policy.grammar(ANY_REPLY, (LOOSE,)) is None
    assert policy.grammar(ReplyOptions(tools=ToolRule(mode="none")), (STRICT,)) is None


@pytest.mark.parametrize("text", ["", "hello", f"first {ADD} then {MUL} at last", ADD])
def test_beside_a_strict_tool_a_reply_may_be_text_and_calls(
    policy: CausalLanguageModel, text: str
) -> None:
    assert allows(policy, ANY_REPLY, text, STRICT, LOOSE)


@pytest.mark.parametrize(
    "text", [ADD.replace("1", '"1"'), ADD.replace("add", "sub"), ADD[:-3], "<tool_call>x"]
)
def test_a_call_of_a_strict_tool_has_its_name_and_arguments_of_its_schema(
    policy: CausalLanguageModel, text: str
) -> None:
    assert not allows(policy, ANY_REPLY, text, STRICT, LOOSE)


@pytest.mark.parametrize(
    ("rule", "allowed"),
    [
        (ToolRule(mode="required"), [ADD, MUL, ADD + MUL]),
        (ToolRule(mode="required", max_calls=1), [ADD, MUL]),
        (ToolRule(mode="required", max_calls=2), [ADD, MUL, ADD + MUL]),
        (ToolRule(mode="required", names=("add",), max_calls=1), [ADD]),
        (ToolRule(max_calls=1), ["hello", ADD, MUL]),
        (ToolRule(names=('m"ül',)), ["hello", MUL]),
    ],
)
def test_a_rule_for_tools_allows_what_it_says(
    policy: CausalLanguageModel, rule: ToolRule, allowed: list[str]
) -> None:
    texts = ["hello", ADD, MUL, ADD + MUL]
    assert [
        text for text in texts if allows(policy, ReplyOptions(tools=rule), text, STRICT, LOOSE)
    ] == allowed


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (JsonFormat(), '{"b": [1, {}]}', "[1]"),
        (JsonFormat(schema=SCHEMA), '{"a":1}', '{"a":1,"b":2}'),
        # white space has a bound
        (JsonFormat(schema=SCHEMA), '{"a":  1}', '{"a": ' + " " * 40 + "1}"),
        (JsonFormat(schema={"not": {}}, is_strict=False), "{}", "x"),
        # no property that is not described
        (JsonFormat(schema=OPEN), '{"a":{"b":1}}', '{"a":{"b":1,"c":2}}'),
        (
            JsonFormat(schema={**OPEN, "additionalProperties": True}),
            '{"a":{"b":1},"d":2}',
            '{"a":{"b":1,"c":2}}',
        ),
        (
            JsonFormat(schema={"allOf": [OPEN, {"properties": {"d": {}}}]}),
            '{"a":{"b":1},"d":2}',
            '{"a":[]}',
        ),
        (ChoiceFormat(choices=("yes", 'nö "never"')), 'nö "never"', "yes!"),
        (RegexFormat(pattern=r"[a-z]+/\d"), "ab/7", "ab/x"),
        (GrammarFormat(lark='start: "<" word\nword: /[xy]+/'), "<xy", "xy"),
    ],
)
def test_a_format_allows_what_it_describes(
    policy: CausalLanguageModel, form: ReplyFormat, good: str, bad: str
) -> None:
    assert allows(policy, ReplyOptions(format=form), good)
    assert not allows(policy, ReplyOptions(format=form), bad)


def test_beside_tools_a_format_describes_the_replies_that_call_none(
    policy: CausalLanguageModel,
) -> None:
    options = ReplyOptions(format=JsonFormat(schema=SCHEMA))
    texts = ['{"a": 1}', "hello", ADD, ADD + ADD]
    assert [text for text in texts if allows(policy, options, text, LOOSE, STRICT)] == [
        '{"a": 1}',
        ADD,
        ADD + ADD,
    ]


def test_a_marker_that_is_no_special_token_is_spelt_out() -> None:
    grammar = reply_grammar(
        ReplyOptions(tools=ToolRule(mode="required")), (STRICT,), marker=lambda name: f'"{name}"'
    )
    assert grammar is not None
    assert 'call: "<tool_call>" SPACE (tool_0) SPACE "</tool_call>"' in grammar


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            ReplyOptions(tools=ToolRule(names=("sub",))),
            r"tools \['sub'\] were requested but not given",
        ),
        (
            ReplyOptions(format=GrammarFormat(lark="start: /a/")),
            "a grammar and tools were given, expected only one of them",
        ),
    ],
)
def test_options_that_no_reply_can_meet_are_refused(
    policy: CausalLanguageModel, options: ReplyOptions, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        policy.grammar(options, (STRICT,))
    with pytest.raises(ValueError, match="a tool call is required but no tools were given"):
        policy.grammar(ReplyOptions(tools=ToolRule(mode="required")), ())
