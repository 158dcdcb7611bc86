"""Replies of a policy to one request, and what went wrong with them."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from vla_rl.endpoint.apis import Asked
from vla_rl.endpoint.errors import RequestError
from vla_rl.endpoint.session import Session
from vla_rl.errors import ContextOverflow, ConversationRejected
from vla_rl.types import Completion, LanguagePolicy


async def generate_replies(
    asked: Asked, policy: LanguagePolicy, session: Session
) -> tuple[Completion, ...]:
    """Return `num_choices` replies to each prompt, in order.

    All are sampled together, each with a seed of its own.

    Raises: RequestError, which tells the client what to do; a failure of the policy is also stored
    in the session.
    """
    one_each = [
        policy.generate(
            prompt, tools=asked.tools, max_tokens=asked.max_tokens, options=asked.options
        )
        for prompt in asked.prompts
        for _ in range(asked.num_choices)
    ]
    try:
        replies = await _together(one_each)
    except ContextOverflow as error:
        session.overflow = error
        raise RequestError(str(error), code="context_length_exceeded") from error
    except ConversationRejected as error:
        if error.is_reply_at_fault:
            session.rejection = error
        raise RequestError(str(error), code="conversation_rejected") from error
    except (
        ValueError,
        RecursionError,
    ) as error:  # a prompt or options that the model does not accept
        raise RequestError(str(error)) from error
    except Exception as error:  # the episode raises it; the client cannot know what to do about it
        session.failure = error
        raise RequestError(f"the policy failed: {type(error).__name__}", status=500) from error
    if any(reply.finish_reason == "aborted" for reply in replies):
        raise RequestError("the generation was aborted; ask again.", status=503)
    return replies


async def _together(calls: list[Coroutine[Any, Any, Completion]]) -> tuple[Completion, ...]:
    """Return all results in order.

    The first error cancels the other calls and is raised unchanged.
    """
    if len(calls) == 1:
        return (await calls[0],)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call, name="one of several replies") for call in calls]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return tuple(task.result() for task in tasks)
