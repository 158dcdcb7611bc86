"""How the actor on a host is started: by the recipe and the policies' files, or taken over.

spawn ─► new: the policies' files ─► open ─┐
   └───► one that waits for this run ──────┴─► ready for the newest weights
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from vla_rl.actors import RemoteHost, Runtime, Takeover
from vla_rl.cluster import Host
from vla_rl.pipelines.config import LearningConfig
from vla_rl.remote_rollout.messages import EnvironmentShare, HostRecipe, HostStatus
from vla_rl.remote_rollout.recipe import pieces_of
from vla_rl.remote_rollout.rollout_host import RolloutHost
from vla_rl.types import Deposit

START_WITHIN_S: Final = 300.0
"""Longest start of the process on a host, which imports torch and the policies' code."""

OPEN_WITHIN_S: Final = 1800.0
"""Longest start of a host: reading the policies, and building all simulators."""

WEIGHTS_WITHIN_S: Final = 300.0
"""Longest time for one message of weights, and for their digest."""

DEADLINES_S: Final = {
    "open": OPEN_WITHIN_S,
    **dict.fromkeys(
        (
            "put_file",
            "begin_weights",
            "put_weights",
            "new_link",
            "give_weights",
            "end_giving",
            "num_received",
            "check_weights",
            "share_weights",
            "open_weights",
            "apply_weights",
            "renew_weights",
            "take",
        ),
        WEIGHTS_WITHIN_S,
    ),
}
"""Episodes have none of their own: simulators have theirs, and a lost host ends its calls. Weights
that are taken from a neighbour end with its life and by its silence."""


@dataclass(frozen=True)
class Started:
    """An actor that is ready for the newest weights."""

    actor: RolloutHost
    status: HostStatus
    is_new: bool
    """False if it was taken over, with its simulators, its weights and some arrays."""


class HostStarter:
    """Starts the actors on the hosts of a run.

    Args:
        runtime: owns them.
        config: settings of the run.
        recipe: what a host needs.
        shares: environments of the hosts that have several engines, by the name of a seat.
        policies: folder with the policies' files, in one folder for each.
        owner: name by which hosts know the run; empty if nothing is taken over.
        deposits: returns the places of the arrays that the run still needs.
        has_weights: whether a host that has other weights can be given the newest ones.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: LearningConfig,
        recipe: HostRecipe,
        shares: Mapping[str, EnvironmentShare],
        policies: Path,
        owner: str,
        deposits: Callable[[], Iterable[Deposit]],
        has_weights: Callable[[], bool],
    ) -> None:
        self._runtime, self._config, self._recipe = runtime, config, recipe
        self._shares, self._policies, self._owner = shares, policies, owner
        self._deposits, self._has_weights = deposits, has_weights

    async def start(self, host: Host) -> Started:
        """Start the actor on a host. Raises: ActorDied, TimeoutError; what `open` raises."""
        actor = await self._spawned(host)
        try:
            recipe = await actor.found()
            if recipe is not None and (reason := self.misfit(host.name, recipe)):
                print(f"host {host.name} starts anew: {reason}", flush=True)
                await self._runtime.kill(actor)
                actor, recipe = await self._spawned(host), None
            if recipe is None:
                return Started(actor, await self._opened(host.name, actor), is_new=True)
            needed = [place.key for place in self._deposits() if place.host == host.name]
            return Started(actor, await actor.resume(needed), is_new=False)
        except BaseException:
            await self._runtime.kill(actor)
            raise

    def misfit(self, name: str, recipe: str) -> str:
        """Return why a process that waited for this run cannot go on; empty if it can.

        Args:
            name: of the host.
            recipe: digest of the recipe by which it runs episodes; empty if it runs none.
        """
        if not recipe:
            return "its process was lost before it was ready, or has failed since"
        if recipe != self._recipe_for(name).digest:
            return "its process has other settings, or a policy with other frozen weights"
        if not self._has_weights():
            return "no weights have been saved or published yet that its process could get"
        return ""

    async def _spawned(self, host: Host) -> RolloutHost:
        """Start the actor on a host, or take over the one that waits there for this run."""
        assert isinstance(host.placement, RemoteHost)
        within_s = self._config.cluster.resume_within_s
        return await self._runtime.spawn(
            RolloutHost,
            host.name,
            int(self._config.cluster.depot_gib * 2**30),
            name=f"rollout on {host.name}",
            placement=replace(
                host.placement,
                env={**host.placement.env, "OMP_NUM_THREADS": str(self._config.run.torch_threads)},
                takeover=Takeover(owner=self._owner, name=host.name, within_s=within_s)
                if self._owner
                else None,
            ),
            deadlines_s=DEADLINES_S,
            # every running episode is a call without an answer; the rest: weights and arrays
            mailbox=2 * self._config.num_envs + 16,
            start_timeout_s=START_WITHIN_S,
        )

    async def _opened(self, name: str, actor: RolloutHost) -> HostStatus:
        pieces = pieces_of(self._policies)
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            await actor.put_file(*piece)
        return await actor.open(self._recipe_for(name))

    def _recipe_for(self, name: str) -> HostRecipe:
        return replace(self._recipe, share=self._shares.get(name))
