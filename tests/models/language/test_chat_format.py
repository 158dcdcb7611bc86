"""Replies to messages: tool calls as Hermes' models write them, and what is wrong with those that
cannot be read.
"""

import numpy as np
import pytest
import transformers
from durations import assert_grows_in_proportion

from vla_rl.engines import DeviceLane
from vla_rl.engines.chat_interface import make_question
from vla_rl.errors import CheckpointError, ConversationRejected
from vla_rl.learner import ImitationConfig, Imitator, OptimizerConfig
from vla_rl.models.language import CausalLanguageModel, ChatFormat, TinyConfig, parse_reply, tiny
from vla_rl.models.language.policy import chat_demonstration
from vla_rl.types import ANY_REPLY, Message, ToolCall, ToolSpec

ADD = ToolSpec(
    name="add",
    description="Add two numbers.",
    parameters={
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    },
)
SHAPE = TinyConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=64,
    vocab_size=300,
    context_size=256,
)


def nested(depth: int) -> str:
    """Return JSON of so many objects inside each other."""
    return '{"a": ' * (depth - 1) + "{}" + "}" * (depth - 1)


@pytest.fixture(scope="module")
def policy() -> CausalLanguageModel:
    return tiny(SHAPE, ["what is 1 + 2?"], seed=0)


def test_text_alone_is_a_message_without_calls() -> None:
    assert parse_reply(" It is 3. ") == Message(role="assistant", content="It is 3.")


def test_calls_are_taken_out_of_the_text_and_their_arguments_stay_as_they_were_written() -> None:
    message = parse_reply(
        'First. <tool_call>{"name": "add", "arguments": {"a":1,  "b": 2}}</tool_call>'
        '<tool_call>\n{"name": "stop"}\n</tool_call>'
    )
    assert message.content == "First."
    assert message.tool_calls == (
        ToolCall(id="call_0", name="add", arguments='{"a":1,  "b": 2}'),
        ToolCall(id="call_1", name="stop", arguments="{}"),
    )
    assert message.call_errors == ()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('<tool_call>{"name": "add", </tool_call>', "not a JSON object"),
        ('<tool_call>["add"]</tool_call>', "not a JSON object"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'no "name"'),
        ('<tool_call>{"name": 3}</tool_call>', 'no "name"'),
        ('<tool_call>{"name": "add"}', "not ended with </tool_call>"),
        ('<tool_call>{"name": "add", "arguments": "a"}</tool_call>', "no object"),
        ('<tool_call>{"name": "add", "arguments": ""}</tool_call>', "no object"),
        ('<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>', "no object"),
        ('<tool_call>{"name": "add", "arguments": 3}</tool_call>', "no object"),
        ('<tool_call>{"name": "add", "arguments": null}</tool_call>', "no object"),
        (f'<tool_call>{{"name": "add", "arguments": {nested(101)}}}</tool_call>', "100 deep"),
        (f'<tool_call>{{"name": "add", "arguments": {nested(3000)}}}</tool_call>', "a tool call"),
        (f"<tool_call>{'[' * 100_000}</tool_call>", "not a JSON object"),
        (
            f'<tool_call>{{"name": "add", "arguments": {{"a": {"9" * 5000}}}}}</tool_call>',
            "cannot be read",
        ),
        ('<tool_call>{"name": "\ud835"}</tool_call>', "not a JSON object"),
    ],
)
def test_a_call_that_cannot_be_read_stays_in_the_text_and_is_said_to_be_wrong(
    text: str, fault: str
) -> None:
    message = parse_reply("Well. " + text)
    assert message.tool_calls == ()
    assert message.content == "Well. " + text
    assert len(message.call_errors) == 1
    assert fault in message.call_errors[0]


def test_arguments_may_be_nested_a_hundred_deep() -> None:
    message = parse_reply(f'<tool_call>{{"name": "add", "arguments": {nested(100)}}}</tool_call>')
    assert [call.arguments for call in message.tool_calls] == [nested(100)]


def test_a_call_begins_with_the_first_of_two_openings() -> None:
    message = parse_reply('<tool_call><tool_call>{"name": "add"}</tool_call> so')
    assert message.content == '<tool_call><tool_call>{"name": "add"}</tool_call> so'
    assert len(message.call_errors) == 1


def test_a_readable_call_beside_an_unreadable_one_counts() -> None:
    message = parse_reply('<tool_call>{"name": "add"}</tool_call><tool_call>add(1, 2)</tool_call>')
    assert [call.name for call in message.tool_calls] == ["add"]
    assert message.content == "<tool_call>add(1, 2)</tool_call>"
    assert len(message.call_errors) == 1


def test_a_prompt_is_what_the_tokenizers_own_template_makes(policy: CausalLanguageModel) -> None:
    messages = (
        Message(role="user", content="what is 1 + 2?"),
        Message(
            role="assistant",
            tool_calls=(ToolCall(id="call_0", name="add", arguments='{"a": 1, "b": 2}'),),
        ),
        Message(role="tool", content="3", tool_call_id="call_0", name="add"),
    )
    text = policy.render_text(messages, (ADD,))
    assert text == (
        '<|im_start|>system\n\n<tools>\n{"name": "add", "description": "Add two numbers.", '
        '"parameters": {"type": "object", '
        '"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}\n</tools><|im_end|>\n'
        "<|im_start|>user\nwhat is 1 + 2?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name": "add", "arguments": {"a": 1, "b": '
        "2}}</tool_call><|im_end|>\n"
        "<|im_start|>tool\n3<|im_end|>\n"
    )
    prompt = policy.render(messages, (ADD,))
    whole = policy.render_whole(messages, (ADD,))
    assert prompt[: len(whole)].tolist() == whole.tolist()
    assert policy.parse(policy.decode(prompt[len(whole) :])).content == "<|im_start|>assistant"


def test_a_reply_read_back_and_written_again_has_the_same_tokens(
    policy: CausalLanguageModel,
) -> None:
    question = (Message(role="user", content="what is 1 + 2?"),)
    call = Message(
        role="assistant",
        tool_calls=(ToolCall(id="call_0", name="add", arguments='{"a": 1, "b": 2}'),),
    )
    prompt, whole = policy.render(question), policy.render_whole((*question, call))
    reply = whole[len(prompt) :]
    stop = int(np.flatnonzero(np.isin(reply, list(policy.stop_tokens)))[0])
    assert policy.parse(policy.decode(reply[: stop + 1])) == call


def test_a_template_that_refuses_a_conversation_is_named(policy: CausalLanguageModel) -> None:
    with pytest.raises(
        ConversationRejected, match=r"rejects a conversation of roles \[\]"
    ) as caught:
        policy.render(())
    assert not caught.value.is_reply_at_fault


ONE_CALL = """
{%- for message in messages %}
  {%- if message.tool_calls is defined and message.tool_calls|length != 1 %}
    {{- raise_exception("one tool call a message") }}
  {%- endif %}
  {{- (message.tool_calls or []) | tojson }}
{%- endfor %}"""
"""Rejects what Llama 3's template rejects."""

ITEMS = """
{%- for message in messages %}{%- for call in message.tool_calls or [] %}
  {%- for name, value in call.function.arguments|items %}
    {{- name ~ "=" ~ (value if value is string else value|tojson) ~ ";" }}
  {%- endfor %}
{%- endfor %}{%- endfor %}"""
"""Writes arguments one by one, as the templates of Qwen3-Coder and GLM do."""

NO_TOOLS = """
{%- for message in messages %}
  {%- if (message.role == "user") != (loop.index0 % 2 == 0) %}
    {{- raise_exception("roles must alternate user/assistant") }}
  {%- endif %}
{%- endfor %}"""
"""Rejects system messages and tools, as Gemma's does."""


def calls(*arguments: str) -> Message:
    return Message(
        role="assistant",
        tool_calls=tuple(
            ToolCall(id=f"call_{number}", name="add", arguments=each)
            for number, each in enumerate(arguments)
        ),
    )


ANSWER = Message(role="tool", content="3", tool_call_id="call_0", name="add")
ASKED = Message(role="user", content="what is 1 + 2?")


@pytest.mark.parametrize(
    ("template", "conversation", "is_reply_at_fault", "words"),
    [
        (ONE_CALL, (ASKED, calls("{}", "{}"), ANSWER, ANSWER), True, "one tool call"),
        (ONE_CALL, (ASKED, calls("{}"), ANSWER, calls("{}", "{}")), True, "one tool call"),
        (ITEMS, (ASKED, calls('"a"'), ANSWER), True, "TypeError: Can only get item pairs"),
        (ITEMS, (ASKED, calls("[1]"), ANSWER), True, "TypeError: Can only get item pairs"),
        (NO_TOOLS, (ASKED, calls("{}"), ANSWER), True, "must alternate"),
        (NO_TOOLS, (Message(role="system", content="Be brief."), ASKED), False, "must alternate"),
        (
            NO_TOOLS,
            (ASKED, Message(role="assistant", content="3"), Message(role="system", content="No.")),
            False,
            "must alternate",
        ),
        ("{{ messages[0].content.index }}", (ASKED,), None, ""),
        ("{{ 1 // 0 }}", (ASKED,), False, "ZeroDivisionError"),
        ("{{ [][1] + 1 }}", (ASKED,), False, "list object has no element 1"),
    ],
)
def test_a_rejection_says_whether_the_policys_own_replies_are_the_cause(
    policy: CausalLanguageModel,
    template: str,
    conversation: tuple[Message, ...],
    is_reply_at_fault: bool | None,
    words: str,
) -> None:
    chat = ChatFormat(policy._tokenizer, policy.stop_tokens, template)
    if is_reply_at_fault is None:
        chat.render(conversation)
        return
    with pytest.raises(ConversationRejected, match="rejects a conversation of roles") as caught:
        chat.render(conversation, (ADD,))
    assert caught.value.is_reply_at_fault is is_reply_at_fault
    assert words in str(caught.value)


def test_a_template_reads_arguments_one_by_one(policy: CausalLanguageModel) -> None:
    chat = ChatFormat(policy._tokenizer, policy.stop_tokens, ITEMS)
    said = (ASKED, parse_reply('<tool_call>{"name": "add", "arguments": {"a": [1]}}</tool_call>'))
    assert chat.render_text(said, (ADD,), add_generation_prompt=True).strip() == "a=[1];"


def test_a_message_without_text_is_no_prompt(policy: CausalLanguageModel) -> None:
    wordless = Message(role="user", content=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"message 1 of 2 \(user\) has the content None, expected"):
        policy.render((ASKED, wordless))


def test_half_a_surrogate_pair_is_replaced_in_every_text_that_is_tokenized(
    policy: CausalLanguageModel,
) -> None:
    half = calls('{"a": "\\ud835"}')  # of a client: a policy's own is a call error
    said = (Message(role="user", content="caf\udce9"), half, ANSWER)
    text = policy.render_text(said, (ADD,))
    assert "<|im_start|>user\ncaf\ufffd<|im_end|>" in text
    assert '{"a": "\ufffd"}' in text
    whole = policy.render_whole(said, (ADD,))
    assert policy._tokenizer.decode(whole) == text
    assert policy.tokenize("\ud835").tolist() == policy.tokenize("\ufffd").tolist()


def test_a_rejection_of_a_long_conversation_is_short(policy: CausalLanguageModel) -> None:
    chat = ChatFormat(
        policy._tokenizer, policy.stop_tokens, "{{ raise_exception(messages[0].content) }}"
    )
    with pytest.raises(ConversationRejected) as caught:
        chat.render([Message(role="user", content="x" * 10_000)] * 50)
    assert "42 messages, then roles ['user'," in str(caught.value)
    assert len(str(caught.value)) < 700


def test_a_tokenizer_without_a_chat_template_is_refused(policy: CausalLanguageModel) -> None:
    class Plain:
        chat_template = None

    with pytest.raises(CheckpointError, match=r"no chat template, expected one"):
        ChatFormat(Plain(), frozenset({2}))
    assert transformers.__version__


@pytest.mark.parametrize(
    "piece",
    [
        "<tool_call>",
        "</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call",
        '<tool_call>{"name": "add", "arguments": {"a": [[[]]]}}</tool_call>',
        "<tool_call>{",
    ],
)
def test_the_work_for_a_reply_grows_in_proportion_to_it(piece: str) -> None:
    assert_grows_in_proportion(lambda size: parse_reply(piece * (size // len(piece))))


def test_a_text_that_spells_a_token_beyond_the_networks_vocabulary_is_the_replys_fault() -> None:
    policy = tiny(SHAPE, ["what is 1 + 2?"], seed=0)
    # as a fine-tuning that did not resize the network
    policy._tokenizer.add_tokens([f"<pad_{number}>" for number in range(SHAPE.vocab_size)])
    with pytest.raises(ConversationRejected, match="expected 0 to 299"):
        make_question(policy, (Message(role="user", content="<pad_299>"),), (), ANY_REPLY)
    said = (ASKED, Message(role="assistant", content="<pad_299>"), ASKED)
    with pytest.raises(ConversationRejected) as caught:
        make_question(policy, said, (), ANY_REPLY)
    assert caught.value.is_reply_at_fault


CHAT = (
    Message(role="user", content="one?"),
    Message(role="assistant", content="two"),
    Message(role="user", content="and?"),
    Message(role="assistant", content="three"),
)


@pytest.fixture
def demonstrating_policy() -> CausalLanguageModel:
    return tiny(SHAPE, ["one two three"], seed=0)


def test_only_the_assistants_own_tokens_train(demonstrating_policy: CausalLanguageModel) -> None:
    demonstration = chat_demonstration(demonstrating_policy, CHAT)
    assert demonstration.trained_tokens is not None
    tokens = demonstration.actions[0]
    ends = [
        length
        for length in range(1, len(tokens) + 1)
        if length == len(tokens) or not demonstration.trained_tokens[length]
    ]
    first = demonstrating_policy.parse(demonstrating_policy.decode(tokens[: ends[0]]))
    assert first.content == "two"
    starts = np.flatnonzero(np.diff(demonstration.trained_tokens.astype(int)) == 1)
    assert (
        demonstrating_policy.parse(
            demonstrating_policy.decode(tokens[int(starts[-1]) + 1 :])
        ).content
        == "three"
    )
    assert int(tokens[-1]) in demonstrating_policy.stop_tokens
    assert (
        demonstration.observation["prompt_tokens"].tolist()
        == demonstrating_policy.render(CHAT[:1]).tolist()
    )


def test_a_conversation_in_which_nobody_answers_is_refused(
    demonstrating_policy: CausalLanguageModel,
) -> None:
    with pytest.raises(ValueError, match="no assistant message, expected at least one"):
        chat_demonstration(demonstrating_policy, CHAT[:1])


async def test_conversations_of_different_lengths_are_learnt_together(
    demonstrating_policy: CausalLanguageModel,
) -> None:
    batch = [
        chat_demonstration(demonstrating_policy, CHAT),
        chat_demonstration(demonstrating_policy, CHAT[:2]),
    ]
    config = ImitationConfig(
        optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0), micro_batch_tokens=40
    )
    async with DeviceLane(1) as lane:
        imitator = Imitator(demonstrating_policy, lane, config)
        losses = [(await imitator.train_step(batch)).metrics["imitation/loss"] for _ in range(25)]
        assert losses[-1] < 0.2 * losses[0]
        with pytest.raises(TypeError, match="evaluate it by running episodes"):
            await imitator.evaluate(batch)


WITHOUT_TOOLS = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}"""


def test_a_template_without_tools_has_them_written_out(
    policy: CausalLanguageModel, caplog: pytest.LogCaptureFixture
) -> None:
    """SmolLM2's template drops tools and calls: the model would see neither."""
    plain = ChatFormat(policy._tokenizer, policy.stop_tokens, WITHOUT_TOOLS)
    conversation = [
        Message(role="system", content="Be brief."),
        Message(role="user", content="1 + 2?"),
        Message(
            role="assistant",
            tool_calls=(ToolCall(id="0", name="add", arguments='{"a": 1, "b": 2}'),),
        ),
        Message(role="tool", content="3", tool_call_id="0"),
    ]
    text = plain.render_text(conversation, [ADD], add_generation_prompt=False)
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou may call these tools:\n<tools>\n{")
    assert '"description": "Add two numbers."' in text
    called = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    assert f"<|im_start|>assistant\n{called}<|im_end|>" in text
    assert parse_reply(called).tool_calls[0].name == "add"
    assert caplog.text.count("the chat template leaves out") == 2
    without = plain.render_text(conversation[:2], [], add_generation_prompt=False)
    assert (
        without == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 2?<|im_end|>\n"
    )


def test_a_template_with_tools_writes_them_itself(
    policy: CausalLanguageModel, caplog: pytest.LogCaptureFixture
) -> None:
    text = policy.render_text([Message(role="user", content="1 + 2?")], [ADD])
    assert "You may call" not in text
    assert '"add"' in text
    assert "leaves out" not in caplog.text
