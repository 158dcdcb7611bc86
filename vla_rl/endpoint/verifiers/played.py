"""The outcome of one row of a verifiers environment, and the interface of its players."""

from typing import Any, Protocol

import msgspec


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout of a verifiers environment."""

    reward: float
    """Reward of the episode; if several roles are trained, the mean of theirs."""

    is_truncated: bool
    stop_condition: str
    metrics: dict[str, float]

    rewards: dict[str, float] = {}
    """Reward of each trained role by name, in an environment that has several."""


class Player(Protocol):
    """Plays rows of one environment."""

    @property
    def num_rows(self) -> int:
        """Rows of its data set."""
        ...

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of its agents, which are the models that they ask for; none if there is one agent."""
        ...

    async def open(self) -> None:
        """Load the environment and its data set."""
        ...

    async def play(self, row: int, base_url: str, api_key: str) -> Played:
        """One rollout whose model is at `base_url`. Raises: EnvError if the environment itself fails."""
        ...

    async def close(self) -> None:
        """Give everything back."""
        ...


def numbers(metrics: Any) -> dict[str, float]:
    """Metrics that were measured."""
    return {name: float(value) for name, value in (metrics or {}).items() if value is not None}
