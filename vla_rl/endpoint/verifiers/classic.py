"""Classic environments of the package verifiers, 0.1.9 to 0.3: rollouts that call a client."""

from collections.abc import Callable
from typing import Any

from vla_rl.endpoint.verifiers.played import Played, numbers
from vla_rl.errors import EnvError


class Classic:
    """An environment made by a module's `load_environment`.

    Args:
        env_id: id of the environment.
        arguments: arguments of its own `load_environment`.
        load: the `load_environment` of verifiers.
    """

    roles: tuple[str, ...] = ()

    def __init__(self, env_id: str, arguments: dict[str, Any], load: Callable[..., Any]) -> None:
        self._env_id, self._arguments, self._load = env_id, arguments, load

    async def open(self) -> None:
        """Load the environment as verifiers does."""
        self._env: Any = self._load(self._env_id, **self._arguments)
        self._rows: Any = self._env.get_dataset()

    @property
    def num_rows(self) -> int:
        """Number of rows of the data set."""
        return len(self._rows)

    async def play(self, row: int, base_url: str, api_key: str) -> Played:
        """Run one rollout."""
        from openai import AsyncOpenAI
        from verifiers.clients import OpenAIChatCompletionsClient

        async with AsyncOpenAI(
            base_url=base_url, api_key=api_key, max_retries=0, timeout=None
        ) as client:
            state = await self._env.run_rollout(
                self._rows[row],
                OpenAIChatCompletionsClient(client),
                "policy",
                {},
                state_columns=["stop_condition"],
            )
        if state.get("error"):
            raise EnvError(f"the environment failed: {state['error']}")
        return Played(
            reward=float(state["reward"] or 0.0),
            is_truncated=bool(state["is_truncated"]),
            stop_condition=str(state.get("stop_condition") or ""),
            metrics=numbers(state.get("metrics")),
        )

    async def close(self) -> None:
        """Do nothing: nothing is open."""
