"""Environments of the OpenEnv library, unchanged, as text environments.

    policy ─ reply or tool call ─► OpenEnvTask ─ WebSocket ─► server of the environment (another program)
           ◄──── message ────────             ◄─ observation, reward, done

The form of a reply follows from the schema of actions that the server publishes:

    one required field of text     the reply is the action                  an answer, a message
    other fields                   the reply is a JSON object of them       a column, a direction
    `tool_name` and `arguments`    the tools of the server are the policy's tools (MCP)
"""

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from vla_rl.envs.text.openenv_session import ActionRefused, OpenEnvSession, Outcome
from vla_rl.envs.text.task import Ask, Done, TextLimits, TextTask
from vla_rl.envs.text.tools import SchemaTool
from vla_rl.types import ANY_REPLY, Info, JsonFormat, ReplyOptions, ToolSpec
from vla_rl.util.values import excerpt

LIST_TOOLS: Final = {"type": "list_tools"}


ReplyForm = Literal["text", "json", "tools"]


class OpenEnvTask(TextTask):
    """One episode of an OpenEnv environment. Reward: the environment's, of each step.

    Args:
        url: address of its server, such as http://127.0.0.1:8000.
        reset: arguments of each reset, beside the seed.
        instruction: text before the first observation: what the policy is to do, if the environment
            does not say so.
        max_turns: most replies of an episode.
        success_at: smallest sum of rewards that counts as success.
        is_guided: restrict replies to JSON objects that fit the schema of actions, if actions have
            that form.
    """

    def __init__(
        self,
        url: str,
        reset: dict[str, Any] | None = None,
        instruction: str = "",
        max_turns: int = 16,
        success_at: float = 1.0,
        is_guided: bool = True,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(
                f"url={url!r}, expected the address of a server, such as http://127.0.0.1:8000"
            )
        self.limits = TextLimits(max_turns=max_turns, tool_timeout_s=60.0)
        self._reset, self._instruction = reset or {}, instruction
        self._success_at, self._is_guided = success_at, is_guided
        self._session = OpenEnvSession(url)
        self._form: ReplyForm = "text"
        self._fields: dict[str, Any] = {}
        self._tools: list[SchemaTool] = []
        self._options = ANY_REPLY
        self._total = self._unpaid = 0.0
        self._is_done = False
        self._failure: Exception | None = None

    async def setup(self, seed: int, options: Info) -> Ask:
        """Reset the environment; return its description and first observation."""
        # reset takes seeds from 0 up to what its own random generator takes, often 32 bits
        first = await self._session.open({"seed": seed % 2**31, **self._reset, **options})
        self._form, self._fields = read_form(self._session.action_schema)
        parts = [self._session.description, self._instruction, observation_text(first.observation)]
        if self._form == "tools":
            self._tools = await self._list_tools()
        if self._form == "json":
            shown = msgspec.json.encode(self._fields).decode()
            parts += [
                self._session.action_schema.get("description", ""),
                f"Reply with a JSON object of these fields: {shown}",
            ]
            self._options = self._restrict()
        self._pay(first)
        return Ask("\n\n".join(filter(None, parts)), options=self._options)

    def tools(self, agent: str) -> Sequence[SchemaTool]:
        """Return the server's tools."""
        return self._tools

    async def reply(self, text: str) -> Ask | Done:
        """Take the reply as an action; where actions are calls of tools, it ends the episode."""
        if self._form == "tools" or self._is_done:
            return self._finish()
        try:
            outcome = await self._session.step(self._read_action(text))
        except ActionRefused as refusal:
            return Ask(f"error: {refusal}", options=self._options)
        self._pay(outcome)
        if outcome.done:
            return self._finish()
        reward, self._unpaid = self._unpaid, 0.0
        return Ask(observation_text(outcome.observation), reward=reward, options=self._options)

    async def after_tool_calls(self) -> Done | None:
        """End the episode if a call has ended the environment's.

        Raises: ActorDied if the server is gone.
        """
        if self._failure is not None:
            raise self._failure
        return self._finish() if self._is_done else None

    async def close(self) -> None:
        """Leave the server's session."""
        await self._session.close()

    async def _list_tools(self) -> list[SchemaTool]:
        listed = (await self._session.step(LIST_TOOLS)).observation.get("tools", ())
        return [
            SchemaTool(
                ToolSpec(
                    name=tool["name"],
                    description=tool.get("description") or tool["name"],
                    parameters=tool.get("input_schema") or {"type": "object", "properties": {}},
                ),
                self._call_tool,
            )
            for tool in listed
        ]

    async def _call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        if self._is_done:
            raise ValueError("the episode is over")
        action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        try:
            outcome = await self._session.step(action)
        except ActionRefused:
            raise
        except Exception as error:
            # The model reads whatever a tool raises, but a server that is gone is no fault of its
            # call: the episode has to run again.
            self._failure = error
            raise
        self._pay(outcome)
        if (refused := outcome.observation.get("error")) is not None:
            raise ValueError(
                refused.get("message", refused) if isinstance(refused, dict) else refused
            )
        return tool_result(outcome.observation.get("result", outcome.observation))

    def _read_action(self, text: str) -> dict[str, Any]:
        """Return the action that a reply stands for. Raises: ActionRefused if it stands for none."""
        if self._form == "text":
            (field,) = self._fields
            return {field: text}
        start, end = text.find("{"), text.rfind("}")
        try:
            return msgspec.json.decode(text[start : end + 1], type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ActionRefused(
                f"{excerpt(text)} is no action, expected a JSON object of {', '.join(self._fields)}"
            ) from error

    def _restrict(self) -> ReplyOptions:
        if not self._is_guided:
            return ANY_REPLY
        schema = {
            "type": "object",
            "properties": self._fields,
            "required": list(self._fields),
            "additionalProperties": False,
        }
        # not strict: a keyword that no grammar can express is the server's to check
        return ReplyOptions(format=JsonFormat(schema=schema, is_strict=False))

    def _pay(self, outcome: Outcome) -> None:
        reward = float(outcome.reward or 0.0)
        self._total += reward
        self._unpaid += reward
        self._is_done |= outcome.done

    def _finish(self) -> Done:
        reward, self._unpaid = self._unpaid, 0.0
        return Done(reward, is_success=self._total >= self._success_at)


def read_form(schema: dict[str, Any]) -> tuple[ReplyForm, dict[str, Any]]:
    """Return the form of replies that an environment's schema of actions asks for, and the fields of
    an action that a reply sets: those that are required, or all of them if none is.
    """
    # each action of OpenEnv may carry metadata, which says nothing to the environment
    fields = {
        name: _plain_schema(each, schema.get("$defs", {}))
        for name, each in schema.get("properties", {}).items()
        if name != "metadata"
    }
    if {"tool_name", "arguments"} <= fields.keys():
        return "tools", fields
    required = {name: fields[name] for name in schema.get("required", ()) if name in fields}
    wanted = required or fields
    is_text = [each.get("type") == "string" and "enum" not in each for each in wanted.values()]
    return ("text" if is_text == [True] else "json"), wanted


def observation_text(observation: dict[str, Any]) -> str:
    """Return an observation as the policy reads it: its text alone if nothing else is in it, else
    JSON without what is empty.
    """
    shown = {
        name: value
        for name, value in observation.items()
        if name not in ("done", "reward", "metadata") and value not in (None, "", [], {})
    }
    if len(shown) == 1 and isinstance(value := next(iter(shown.values())), str):
        return value
    return msgspec.json.encode(shown).decode() if shown else ""


def tool_result(result: Any) -> Any:
    """Return what a tool returned, without the wrapping of MCP's clients."""
    if isinstance(result, dict) and "content" in result and result.get("data") is not None:
        return result["data"]
    return result


def _plain_schema(schema: Any, definitions: dict[str, Any]) -> Any:
    """Return a schema with its definitions in their places, and without the titles that pydantic adds
    to each field: they repeat its name. A schema that contains itself keeps its reference.
    """
    if isinstance(schema, list):
        return [_plain_schema(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    reference = schema.get("$ref")
    name = reference.removeprefix("#/$defs/") if isinstance(reference, str) else None
    if name in definitions:
        others = {each: value for each, value in definitions.items() if each != name}
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return _plain_schema({**definitions[name], **rest}, others)
    return {
        key: _plain_schema(value, definitions)
        for key, value in schema.items()
        if key != "title" or not isinstance(value, str)
    }
