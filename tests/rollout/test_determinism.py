"""Deterministic mode: one seed gives one training input, bit for bit, whatever the timing and the
number of environments.
"""

import asyncio

import pytest
from rollout_fakes import CountingEngine, Faults, LatencyPool, fingerprint, source

from vla_rl.rollout import EpisodeScheduler, LocalEpisodeRunner, SchedulerConfig, embodied_agent
from vla_rl.util.simulated_time import run_in_simulated_time


async def run(
    num_envs: int, timing_seed: int, *, filtered: bool, faults: Faults, run_seed: int = 0
) -> list[str]:
    """Four synchronous updates of 4 groups of 4; the digest of each."""
    pool = LatencyPool(num_envs, seed=timing_seed, faults=faults, deadline_s=0.2)
    engine = CountingEngine(deterministic=True)
    config = SchedulerConfig(
        groups_per_update=4, max_staleness=0, deterministic=True, max_attempts=50
    )
    scheduler = EpisodeScheduler(
        LocalEpisodeRunner(pool, engine, embodied_agent),
        source(20, 4, run_seed),
        config,
        keep=(lambda group: 0.0 < group.success_rate < 1.0) if filtered else None,
    )
    digests = []
    async with asyncio.timeout(36_000), engine.batcher, scheduler:
        for update in range(4):
            groups = [group async for group in scheduler.groups_for_update(update)]
            digests.append(fingerprint(groups))
            engine.weight_version = update + 1
            scheduler.trained(groups, update + 1)
    return digests


@pytest.mark.parametrize("filtered", [False, True], ids=["all groups", "dynamic sampling"])
def test_training_input_does_not_depend_on_timing_or_on_how_many_environments_play(
    filtered: bool,
) -> None:
    reference = run_in_simulated_time(run(1, 0, filtered=filtered, faults=Faults()))
    assert len(set(reference)) == 4
    for num_envs, timing_seed in ((2, 0), (7, 0), (7, 1), (16, 1)):
        other = run_in_simulated_time(
            run(num_envs, timing_seed, filtered=filtered, faults=Faults())
        )
        assert other == reference, f"{num_envs} environments, timing {timing_seed}"


def test_dead_and_frozen_simulators_do_not_change_the_training_input() -> None:
    faults = Faults(death=0.1, freeze=0.1, slow=0.1)
    reference = run_in_simulated_time(run(1, 0, filtered=True, faults=Faults()))
    for timing_seed in range(2):
        assert run_in_simulated_time(run(5, timing_seed, filtered=True, faults=faults)) == reference


def test_another_run_seed_gives_other_training_input() -> None:
    one = run_in_simulated_time(run(4, 0, filtered=False, faults=Faults(), run_seed=0))
    other = run_in_simulated_time(run(4, 0, filtered=False, faults=Faults(), run_seed=1))
    assert not set(one) & set(other)
