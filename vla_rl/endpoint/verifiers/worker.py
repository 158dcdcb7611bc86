"""The process of a verifiers environment: it runs rows of the data set against the endpoint."""

from typing import Any

from vla_rl.actors import Actor, actor_method
from vla_rl.endpoint.verifiers.played import Played, Player
from vla_rl.endpoint.verifiers.players import player_of, told
from vla_rl.errors import ConfigError, EnvError


class VerifiersWorker(Actor):
    """Loads an environment once, and runs any number of its rows at a time.

    Args:
        env_id: name of the environment in verifiers.
        arguments: arguments of the environment, as plain values.
        max_rows: rows of the data set that are used; None: all.
    """

    def __init__(self, env_id: str, arguments: dict[str, Any], max_rows: int | None) -> None:
        self._env_id, self._arguments, self._max_rows = env_id, arguments, max_rows
        self._player: Player | None = None

    async def on_start(self) -> None:
        """Load the environment.

        Raises: ConfigError, with the cause, if verifiers or the environment cannot be loaded.
        """
        try:
            player = player_of(self._env_id, self._arguments, self._max_rows)
            await player.open()
        except ConfigError:
            raise
        except Exception as error:  # an environment's own code may raise any error
            raise ConfigError(f"verifiers cannot load {self._env_id!r}: {told(error)}") from error
        self._player = player

    async def on_stop(self) -> None:
        """Close the environment."""
        if self._player is not None:
            await self._player.close()

    async def num_rows(self) -> int:
        """Return the number of rows of the data set."""
        assert self._player is not None
        return (
            self._player.num_rows
            if self._max_rows is None
            else min(self._player.num_rows, self._max_rows)
        )

    async def roles(self) -> tuple[str, ...]:
        """Return the names of the agents, which are the models that they request.

        Empty if there is one agent.
        """
        assert self._player is not None
        return self._player.roles

    @actor_method(concurrent=True)
    async def play(self, row: int, base_url: str, api_key: str) -> Played:
        """Run one rollout, whose model is at `base_url`.

        Raises: EnvError if the environment itself fails.
        """
        assert self._player is not None
        try:
            return await self._player.play(row, base_url, api_key)
        except Exception as error:  # an environment's own code may raise any error
            raise EnvError(
                f"the verifiers environment {self._env_id!r} failed at row {row}: {told(error)}"
            ) from error
