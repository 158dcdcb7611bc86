"""The outcome of one row of a verifiers environment, and the interface that runs rows."""

from typing import Any, Protocol

import msgspec


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one rollout of a verifiers environment."""

    reward: float
    """Reward of the episode; if several roles are trained, the mean of theirs."""

    is_truncated: bool
    stop_condition: str
    metrics: dict[str, float]

    rewards: dict[str, float] = {}
    """Reward of each trained role by name, in an environment that has several."""


class Player(Protocol):
    """Runs rows of one environment."""

    @property
    def num_rows(self) -> int:
        """Number of rows of the data set."""
        ...

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the agents, which are the models that they request.

        Empty if there is one agent.
        """
        ...

    async def open(self) -> None:
        """Load the environment and its data set."""
        ...

    async def play(self, row: int, base_url: str, api_key: str) -> Played:
        """Run one rollout whose model is at `base_url`.

        Raises: EnvError if the environment itself fails.
        """
        ...

    async def close(self) -> None:
        """Release all resources."""
        ...


def numbers(metrics: Any) -> dict[str, float]:
    """Return the metrics that have a value."""
    return {name: float(value) for name, value in (metrics or {}).items() if value is not None}
