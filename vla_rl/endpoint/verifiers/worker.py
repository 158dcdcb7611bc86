"""The process that holds a verifiers environment: it plays rows of its data set against our endpoint, unchanged.

Runs in any interpreter that has verifiers and what an actor needs; nothing of it is imported elsewhere.
"""

import json
from typing import Any

import msgspec

from vla_rl.actors import Actor, endpoint
from vla_rl.errors import ConfigError, EnvError


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout of a verifiers environment."""

    reward: float
    is_truncated: bool
    stop_condition: str
    metrics: dict[str, float]


class VerifiersWorker(Actor):
    """Loads an environment once, and plays any number of its rows at a time.

    Args:
        env_id: as `verifiers.load_environment` takes it.
        arguments: of the environment, as plain values.
    """

    def __init__(self, env_id: str, arguments: dict[str, Any]) -> None:
        self._env_id, self._arguments = env_id, arguments
        self._env: Any = None
        self._rows: Any = None

    async def on_start(self) -> None:
        """Load the environment. Raises: ConfigError without verifiers or without the environment."""
        try:
            import verifiers  # only here: it is large, and often in another interpreter
        except ModuleNotFoundError as error:
            raise ConfigError(
                "a verifiers environment needs verifiers; run `pip install 'verifiers>=0.1.9,<0.3'` in this interpreter, or "
                "name one that has it: VerifiersConfig(python=...)"
            ) from error
        load = getattr(verifiers, "load_environment", None)
        if load is None:
            raise ConfigError(
                f"verifiers {verifiers.__version__} has no load_environment, expected 0.1.9 to 0.2; install "
                "'verifiers<0.3' in an interpreter of its own and name it: VerifiersConfig(python=...)"
            )
        try:
            self._env = load(self._env_id, **self._arguments)
        except Exception as error:  # whatever an environment's own code raises
            raise ConfigError(f"verifiers cannot load {self._env_id!r}: {type(error).__name__}: {error}") from error
        self._rows = self._env.get_dataset()

    async def num_rows(self) -> int:
        """Rows of its data set."""
        return len(self._rows)

    @endpoint(concurrent=True)
    async def play(self, row: int, base_url: str, api_key: str) -> Played:
        """One rollout, whose model is at `base_url`. Raises: EnvError where the environment itself fails."""
        from openai import AsyncOpenAI
        from verifiers.clients import OpenAIChatCompletionsClient

        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=None) as client:
            state = await self._env.run_rollout(
                self._rows[row], OpenAIChatCompletionsClient(client), "policy", {}, state_columns=["stop_condition"]
            )
        if state.get("error"):
            raise EnvError(
                f"the verifiers environment {self._env_id!r} failed at row {row}: {json.dumps(state['error'])[:2000]}"
            )
        return Played(
            reward=float(state["reward"] or 0.0),
            is_truncated=bool(state["is_truncated"]),
            stop_condition=str(state.get("stop_condition") or ""),
            metrics={name: float(value) for name, value in (state.get("metrics") or {}).items() if value is not None},
        )
