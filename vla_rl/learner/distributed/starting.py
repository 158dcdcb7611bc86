"""The start of ranks: their processes, and how they meet."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from vla_rl.actors import Runtime
from vla_rl.errors import ConfigError
from vla_rl.learner.config import LearnerConfig
from vla_rl.learner.distributed.meeting import MEET_WITHIN_S, Meeting, Network
from vla_rl.learner.distributed.rank import LearnerRank
from vla_rl.learner.distributed.rank_parts import PolicySource
from vla_rl.learner.distributed.seats import Seating, process_of

START_TIMEOUT_S: Final = 600.0
"""Longest start of a rank, in which it imports torch and the policy's code."""


class RankStart:
    """Starts ranks where they sit. Each method is for one rank; all are called for every rank.

    Args:
        runtime: starts the processes.
        config: settings of the ranks.
        seating: where they are.
        folder: a folder here that lasts as long as the ranks.
    """

    def __init__(
        self, runtime: Runtime, config: LearnerConfig, seating: Seating, folder: Path
    ) -> None:
        self._runtime, self._config, self._seating = runtime, config, seating
        self._here = Meeting(file=str(folder / "meeting-point"))
        self._networks = _networks_of(seating)

    async def spawned(self, rank: int, name: str, source: PolicySource, model: Any) -> LearnerRank:
        """Start the process of a rank. Raises: ConfigError if its host lacks the policy's module."""
        seat = self._seating.seats[rank]
        try:
            return await self._runtime.spawn(
                LearnerRank,
                rank,
                source,
                self._config,
                name=name,
                placement=process_of(seat, model),
                start_timeout_s=START_TIMEOUT_S,
            )
        except ImportError as error:
            raise ConfigError(
                f"rank {rank}{seat.in_words} cannot import {source.policy_class}: {error}; expected "
                "the same modules as here, in a package that is installed, or on PYTHONPATH of "
                "`vla-rl host`"
            ) from error

    async def listening(self, rank: int, first: LearnerRank) -> Meeting:
        """Return where the ranks meet; rank 0 waits there for those of other hosts.

        Raises: ConfigError if it cannot.
        """
        network = self._networks[rank]
        if rank > 0 or network is None:
            return self._here
        try:
            return await first.listen(network, self._seating.port, len(self._networks))
        except ConfigError as error:
            raise self._located(rank, error) from error

    async def met(self, rank: int, actor: LearnerRank, meeting: Meeting) -> None:
        """Connect a rank to all others. Raises: ConfigError, TimeoutError if it cannot."""
        try:
            # twice: those that wait for a host that is missing report it first
            async with asyncio.timeout(2 * MEET_WITHIN_S):
                await actor.meet(meeting, self._networks[rank])
        except ConfigError as error:
            raise self._located(rank, error) from error
        except TimeoutError:
            raise TimeoutError(
                f"the ranks did not connect to each other within {2 * MEET_WITHIN_S:g} s; let the "
                "hosts that learn reach all of each other's ports, or name another `interface` in "
                "the list of hosts"
            ) from None

    def _located(self, rank: int, error: ConfigError) -> ConfigError:
        return ConfigError(f"rank {rank}{self._seating.seats[rank].in_words}: {error}")


def saved(model: Any, folder: Path, seating: Seating) -> PolicySource:
    """Save a policy for the ranks; the folder lasts as long as they do.

    Raises: ConfigError for compiled blocks.
    """
    if getattr(model, "compiles_blocks", False):
        raise ConfigError(
            "the policy's blocks are compiled, which learner ranks do not do yet, expected either "
            "of both: leave --compile-blocks out, or set --learner.ranks 1"
        )
    model.save(folder)
    kind, network = type(model), model.network
    parameters = dict(network.named_parameters())
    return PolicySource(
        policy_class=f"{kind.__module__}:{kind.__qualname__}",
        dtype=str(next(iter(parameters.values())).dtype).removeprefix("torch."),
        trained=frozenset(name for name, each in parameters.items() if each.requires_grad),
        recomputes=getattr(model, "recomputes_activations", False),
        devices=tuple(seat.device for seat in seating.seats),
    )


def _networks_of(seating: Seating) -> Sequence[Network | None]:
    """Return what each rank uses of its host's network; None if all are on this host."""
    if seating.has_several_hosts:
        return [Network(seat.address, seat.interface) for seat in seating.seats]
    # all on another one: its loopback
    return [Network("127.0.0.1") if seating.far_hosts else None] * len(seating.seats)
