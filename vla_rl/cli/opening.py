"""Open environments once without running episodes, for a dry run. Imports no torch."""

from collections.abc import Iterable, Sequence

import msgspec

from vla_rl.actors import Runtime
from vla_rl.env_workers import SimulatorConfig, SimulatorPool
from vla_rl.envs.text import is_text_task, make_text_task
from vla_rl.types import EnvSpec, EpisodeSpec


async def open_each(envs: Sequence[EnvSpec], config: SimulatorConfig) -> None:
    """Open every environment once, as a run would.

    Raises: EnvError, ConfigError if one cannot be opened.
    """
    simulated = [env for env in envs if not is_text_task(env)]
    for env in envs:
        if is_text_task(env):
            make_text_task(env)
    if not simulated:
        return
    print(
        f"opening {len(simulated)} environments once, to check that they can be opened", flush=True
    )
    alone = msgspec.structs.replace(config, num_envs=1)
    async with (
        Runtime("dry run") as runtime,
        SimulatorPool(runtime, alone, specs=simulated) as pool,
    ):
        for number, env in enumerate(simulated):
            episode = EpisodeSpec(
                episode_id=number,
                group_id=number,
                member=0,
                env=env,
                task=env.id,
                seed=0,
                policy_seed=0,
            )
            async with pool.lease(episode):
                pass


def distinct(envs: Iterable[EnvSpec]) -> list[EnvSpec]:
    """Return each environment once, in order."""
    return list({msgspec.json.encode(env, order="deterministic"): env for env in envs}.values())
