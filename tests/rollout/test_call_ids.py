"""Tool calls have ids that are unique in their conversation."""

from vla_rl.rollout.policies import with_unique_call_ids
from vla_rl.types import Message, ToolCall


def calling(*ids: str) -> Message:
    calls = tuple(ToolCall(id=id, name="add", arguments=f'"{id}"') for id in ids)
    return Message(role="assistant", tool_calls=calls)


def ids_of(message: Message) -> list[str]:
    return [call.id for call in message.tool_calls]


def test_new_ids_stay_as_the_model_wrote_them() -> None:
    reply = calling("mine")
    assert with_unique_call_ids(reply, [calling("call_0")]) is reply


def test_ids_that_were_used_are_numbered_on_from_the_conversation() -> None:
    reply = with_unique_call_ids(calling("call_0", "call_1"), [calling("call_0", "call_1")])
    assert ids_of(reply) == ["call_2", "call_3"]
    assert [call.arguments for call in reply.tool_calls] == ['"call_0"', '"call_1"']


def test_a_number_that_the_conversation_has_already_is_passed_over() -> None:
    assert ids_of(with_unique_call_ids(calling("x"), [calling("x", "call_2")])) == ["call_3"]
