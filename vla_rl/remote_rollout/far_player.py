"""A rollout host as an `EpisodePlayer` of this process."""

from collections.abc import Callable

import msgspec

from vla_rl.remote_rollout.messages import HostStatus
from vla_rl.remote_rollout.picture_routes import PictureRoute
from vla_rl.remote_rollout.rollout_host import RolloutHost
from vla_rl.rollout import DecisionCounts, EpisodeLost, owned_copy
from vla_rl.rollout.depot import lacks_observed, made_whole
from vla_rl.types import EpisodeSpec, Trajectory


class FarPlayer:
    """Runs episodes on another host, whose large arrays stay there, as far as there is room.

    Args:
        host: the actor there, open.
        status: what it offers.
        evaluates: run episodes as evaluations do, with clipped actions, and not by the run's agent.
        route: the way of its pictures past this process; None if they come here.
    """

    def __init__(
        self,
        host: RolloutHost,
        status: HostStatus,
        *,
        evaluates: bool = False,
        route: PictureRoute | None = None,
    ) -> None:
        self._host, self._status, self._evaluates, self._route = host, status, evaluates, route
        self._counts = DecisionCounts(0, 0, 0.0)
        self._dropped: list[int] = []

    @property
    def num_slots(self) -> int:
        """Number of environments there."""
        return self._status.num_slots

    @property
    def weight_version(self) -> int:
        """Version of the weights when it joined; it serves all later ones too."""
        return self._status.weight_version

    @property
    def coming_version(self) -> int:
        """The same: it joins with the newest version."""
        return self._status.weight_version

    async def play(self, episode: EpisodeSpec, *, timeout_s: float | None = None) -> Trajectory:
        """Run `episode` there. Raises: ActorDied if the host is gone; else as `play_episode`."""
        dropped, self._dropped = self._dropped, []
        played = await self._host.play(episode, timeout_s, dropped, self._evaluates)
        self._counts = played.counts
        if played.loss is not None:
            raise EpisodeLost(episode, played.loss.kind, played.loss.what)
        assert played.trajectory is not None, "an episode that is not lost has a trajectory"
        return _owned(played.trajectory, episode)

    def holds(self, trajectory: Trajectory) -> bool:
        """Return whether its arrays were there when the host was taken over."""
        deposit = trajectory.deposit
        return deposit is None or deposit.key in self._status.kept

    async def whole(self, trajectory: Trajectory) -> Trajectory:
        """Return a light trajectory with all its arrays, or with places on a shelf for its pictures.

        Raises: ActorDied; EpisodeLost; RankFailed if the shelf is gone.
        """
        deposit = trajectory.deposit
        if deposit is None:
            return trajectory
        route = self._route if lacks_observed(trajectory) else None
        # the pictures first: what is taken from the host is no longer there
        found = None if route is None else await route.fetch(deposit)
        arrays = None
        try:
            arrays = await self._host.take(deposit.key, found is not None)
        finally:
            if arrays is None and route is not None and found is not None:
                route.drop(found[0])
        if arrays is None:
            what = f"host {deposit.host!r} was started again since, and lacks its arrays"
            raise EpisodeLost(trajectory.episode, "died", what)
        if route is not None and found is None:
            route.came_here()
        shelved, pictures = (None, {}) if found is None else found
        whole = made_whole(trajectory, {**owned_copy(arrays), **pictures})
        return msgspec.structs.replace(whole, shelved=shelved)

    def drop(self, trajectory: Trajectory) -> None:
        """Let the arrays be dropped there, with the next episode's message."""
        if trajectory.deposit is not None:
            self._dropped.append(trajectory.deposit.key)

    def decisions(self, now: float) -> DecisionCounts:
        """Return the counts as of the last episode that ended there."""
        return self._counts

    def when_more_may_begin(self, call: Callable[[], None]) -> None:
        """Do nothing: a host's environments are as many as ever."""


def _owned(trajectory: Trajectory, episode: EpisodeSpec) -> Trajectory:
    """Copy the arrays, which are read-only and lie in the message's frames."""
    steps = tuple(
        msgspec.structs.replace(
            step,
            **{
                name: owned_copy(getattr(step, name))
                for name in ("observation", "rewards", "frames")
            },
            chunk=msgspec.structs.replace(
                step.chunk,
                **{
                    name: owned_copy(getattr(step.chunk, name))
                    for name in ("actions", "tokens", "log_probs", "weight_versions")
                },
            ),
        )
        for step in trajectory.steps
    )
    return msgspec.structs.replace(
        trajectory,
        episode=episode,
        steps=steps,
        final_observation=owned_copy(trajectory.final_observation),
        info=owned_copy(trajectory.info),
    )
