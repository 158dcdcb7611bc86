"""Ids of tool calls that are unique in their conversation.

A model's chat format numbers the calls of one reply only, and a conversation has many replies.
"""

from collections.abc import Sequence
from itertools import count

import msgspec

from vla_rl.types import Message


def with_unique_call_ids(reply: Message, earlier: Sequence[Message]) -> Message:
    """Return `reply`, with its tool calls renumbered if their ids were used before.

    Args:
        reply: a reply whose own ids differ from each other.
        earlier: the conversation that it answers. The same conversation and reply always give the
            same ids.
    """
    taken = {call.id for message in earlier for call in message.tool_calls}
    if taken.isdisjoint(call.id for call in reply.tool_calls):
        return reply
    num_earlier = sum(len(message.tool_calls) for message in earlier)
    free = (name for number in count(num_earlier) if (name := f"call_{number}") not in taken)
    calls = tuple(msgspec.structs.replace(call, id=next(free)) for call in reply.tool_calls)
    return msgspec.structs.replace(reply, tool_calls=calls)
