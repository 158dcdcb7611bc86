"""Policies of a team, each over ranks of its own, learn what they learn in one process."""

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from small_worlds import mlp, walk

from benchmarks.shared_updates import settings
from vla_rl.actors import Runtime
from vla_rl.engines import DeviceLane
from vla_rl.errors import RankFailed
from vla_rl.learner import (
    Critic,
    CriticConfig,
    CriticTeam,
    Learner,
    LearnerTeam,
    OptimizerConfig,
    Reference,
    ReferenceTeam,
    TeamState,
    load_checkpoint,
    save_checkpoint,
)
from vla_rl.learner.checkpoint.folders import newest_name
from vla_rl.learner.distributed import ShardedLearner
from vla_rl.models.mlp import MlpPolicy
from vla_rl.types import Trajectory

pytestmark = pytest.mark.asyncio(loop_scope="session")

CRITIC = CriticConfig(optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0), epochs=1, micro_batch=2)
ADVANTAGES = (1.0, -0.5)


def policies() -> dict[str, MlpPolicy]:
    return {"left": mlp(0), "right": mlp(1)}


def episodes(of: Mapping[str, MlpPolicy]) -> list[Trajectory]:
    """Two episodes in which both agents decide, one after the other."""
    made = []
    for seed, steps in ((1, 3), (2, 2)):
        parts = [walk(policy, seed, steps) for policy in of.values()]
        decided = [
            msgspec.structs.replace(step, agent=name)
            for name, part in zip(of, parts, strict=True)
            for step in part.steps
        ]
        made.append(msgspec.structs.replace(parts[0], steps=tuple(decided)))
    return made


def weights(of: Mapping[str, MlpPolicy]) -> torch.Tensor:
    return torch.cat(
        [each.detach().flatten() for policy in of.values() for each in policy.network.parameters()]
    )


async def test_a_team_over_ranks_learns_what_it_learns_in_one_process(
    runtime: Runtime, tmp_path: Path
) -> None:
    alone, shared = policies(), policies()
    trajectories = episodes(alone)
    returns = [np.linspace(-1.0, 1.0, len(each.steps)) for each in trajectories]
    async with DeviceLane(1) as lane, asyncio.timeout(250):
        ranks = {
            name: ShardedLearner(policy, runtime, lane, settings(ranks=2), member=name)
            for name, policy in shared.items()
        }
        two, one = (
            LearnerTeam(ranks),
            LearnerTeam({name: Learner(each, lane, settings()) for name, each in alone.items()}),
        )
        critics = (
            CriticTeam({name: each.critic(CRITIC, seed=3) for name, each in ranks.items()}),
            CriticTeam({name: Critic(each, lane, CRITIC, seed=3) for name, each in alone.items()}),
        )
        references = (
            ReferenceTeam({name: each.reference() for name, each in ranks.items()}),
            ReferenceTeam({name: Reference(each, lane, 2) for name, each in alone.items()}),
        )
        async with ranks["left"], ranks["right"]:
            for number in range(3):
                judged = [await each.values(trajectories) for each in critics]
                for many, single in zip(*judged, strict=True):
                    assert many.values == pytest.approx(single.values, rel=1e-5, abs=1e-6)
                for critic, values in zip(critics, judged, strict=True):
                    await critic.update(trajectories, values, returns)
                reports = [await each.update(trajectories, list(ADVANTAGES)) for each in (two, one)]
                assert weights(shared).numpy() == pytest.approx(weights(alone).numpy(), abs=1e-5)
                lanes = {"left/rank 0", "right/rank 1", "right/rank 1, collectives"}
                assert lanes <= reports[0].slices.keys()
                assert "left: ranks wait" in reports[0].note
                if number == 0:  # ranks go on from a checkpoint of theirs, as does one process
                    state = TeamState((await two.snapshot()).members, await critics[0].snapshot())
                    await save_checkpoint(tmp_path, state, {})
                    found = (await load_checkpoint(tmp_path / "update-000001")).state
                    for learner, critic in ((two, critics[0]), (one, critics[1])):
                        await learner.restore(found)
                        await critic.restore(found.critic, found.critic_file)
            scores = [await each.log_probs(trajectories) for each in references]
    for many, single in zip(*scores, strict=True):
        for found_row, expected in zip(many, single, strict=True):
            assert found_row == pytest.approx(expected, rel=1e-5, abs=1e-6)


async def test_a_rank_that_dies_while_it_saves_costs_no_older_checkpoint_and_all_begin_anew(
    runtime: Runtime,
    tmp_path: Path,
) -> None:
    shared, first = policies(), weights(policies())
    trajectories = episodes(shared)
    async with DeviceLane(1) as lane, asyncio.timeout(250):
        ranks = {
            name: ShardedLearner(policy, runtime, lane, settings(ranks=2), member=name)
            for name, policy in shared.items()
        }
        team = LearnerTeam(ranks)

        async def killed_while_saving() -> None:
            async with ranks["left"], ranks["right"]:
                await team.update(trajectories, list(ADVANTAGES))
                await save_checkpoint(tmp_path, await team.snapshot(), {})
                await team.update(trajectories, list(ADVANTAGES))
                staged = await team.snapshot()
                os.kill(runtime.info(ranks["right"].ranks.ranks[1]).pid, signal.SIGKILL)
                await save_checkpoint(tmp_path, staged, {})

        with pytest.raises(
            RankFailed, match=r"rank 1 of 2 of 'right' \(pid \d+\) is gone: SIGKILL"
        ):
            await killed_while_saving()
    assert newest_name(tmp_path) == str(tmp_path / "update-000001")
    assert (await load_checkpoint(tmp_path / "update-000001")).state.weight_version == 1
    # the ranks of the other policy were well, and a restart without a checkpoint needs both as they
    # were in the beginning
    assert torch.equal(weights(shared), first)
