"""Episodes and replies for the tests of text environments."""

from typing import Any

from vla_rl.types import EnvSpec, EpisodeSpec, Message, ToolCall


def spec_of(
    env_id: str, seed: int = 0, options: dict[str, Any] | None = None, **kwargs: Any
) -> EpisodeSpec:
    return EpisodeSpec(
        episode_id=seed,
        group_id=0,
        member=0,
        env=EnvSpec(id=env_id, kwargs=kwargs),
        task=env_id,
        seed=seed,
        policy_seed=0,
        options=options or {},
    )


def say(text: str) -> Message:
    return Message(role="assistant", content=text)


def ask_tool(*calls: tuple[str, str], errors: tuple[str, ...] = ()) -> Message:
    """A reply with tool calls (name, arguments as JSON), numbered from 0."""
    made = tuple(
        ToolCall(id=str(number), name=name, arguments=text)
        for number, (name, text) in enumerate(calls)
    )
    return Message(role="assistant", tool_calls=made, call_errors=errors)
