"""Several policies that learn in one run: what a team does is what its members would do with their
own decisions.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from vla_rl.engines import DeviceLane
from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.learner import (
    Critic,
    CriticConfig,
    CriticTeam,
    Learner,
    LearnerConfig,
    LearnerTeam,
    OptimizerConfig,
    Reference,
    ReferenceTeam,
    load_checkpoint,
    save_checkpoint,
)
from vla_rl.models.language import CausalLanguageModel, TinyConfig, tiny
from vla_rl.types import (
    SOLE_MEMBER,
    ActionChunk,
    EnvSpec,
    EpisodeSpec,
    Step,
    StopReason,
    Trajectory,
    split_by_agent,
)

SHAPE = TinyConfig(
    hidden_size=32, num_layers=1, num_heads=2, intermediate_size=64, vocab_size=300, context_size=64
)
CONFIG = LearnerConfig(optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0))
CRITIC = CriticConfig(optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0), epochs=1)
NAMES = ("solver", "checker")


def policies() -> dict[str, CausalLanguageModel]:
    return {name: tiny(SHAPE, ["a"], seed=seed) for seed, name in enumerate(NAMES)}


def turn(
    policy: CausalLanguageModel, agent: str, prompt: Sequence[int], reply: Sequence[int]
) -> Step:
    tokens, observation = np.array(reply), {"prompt_tokens": np.array(prompt)}
    with torch.inference_mode():
        log_probs, _ = policy.log_probs(
            policy.prepare([observation]), torch.from_numpy(tokens)[None], torch.ones(1)
        )
    chunk = ActionChunk(
        actions=tokens[None], tokens=tokens, log_probs=log_probs[0].numpy(), weight_version=0
    )
    return Step(observation=observation, chunk=chunk, rewards=np.zeros(1, np.float32), agent=agent)


def episodes(of: dict[str, CausalLanguageModel]) -> list[Trajectory]:
    """solver, checker, solver, cut off; and checker alone."""
    made = (
        [("solver", [5, 6], [20, 21]), ("checker", [7], [22]), ("solver", [5, 6, 20, 21, 8], [23])],
        [("checker", [9, 9], [24, 25, 26])],
    )
    trajectories = []
    for number, turns in enumerate(made):
        spec = EpisodeSpec(
            episode_id=number,
            group_id=0,
            member=number,
            env=EnvSpec(id="x"),
            task="x",
            seed=0,
            policy_seed=0,
        )
        steps = tuple(turn(of[agent], agent, prompt, reply) for agent, prompt, reply in turns)
        trajectories.append(
            Trajectory(
                episode=spec,
                steps=steps,
                final_observation={"prompt_tokens": np.array([5, 6, 20, 21, 8, 23])},
                stop_reason=StopReason.TURN_LIMIT if number == 0 else StopReason.TERMINATED,
            )
        )
    return trajectories


ADVANTAGES = [np.array([1.0, -2.0, 0.5]), np.array([3.0])]


def weights_of(policy: CausalLanguageModel) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in policy.network.parameters()])


async def test_each_learner_learns_what_it_would_from_its_own_decisions_alone() -> None:
    together, apart = policies(), policies()
    trajectories = episodes(together)
    async with DeviceLane(1) as lane:
        team = LearnerTeam(
            {name: Learner(policy, lane, CONFIG) for name, policy in together.items()}
        )
        report = await team.update(trajectories, ADVANTAGES)
        for name, policy in apart.items():
            parts = split_by_agent(trajectories, name)
            await Learner(policy, lane, CONFIG).update(
                [part.trajectory for part in parts],
                [ADVANTAGES[part.row][list(part.decisions)] for part in parts],
            )
    assert report.weight_version == team.weight_version == 1
    assert (
        report.metrics["solver/update/decisions"],
        report.metrics["checker/update/decisions"],
    ) == (2.0, 2.0)
    for name in NAMES:
        assert torch.equal(weights_of(together[name]), weights_of(apart[name]))
        assert not torch.equal(weights_of(together[name]), weights_of(policies()[name]))


async def test_learners_take_turns_of_so_many_updates() -> None:
    async with DeviceLane(1) as lane:
        team = LearnerTeam(
            {name: Learner(policy, lane, CONFIG) for name, policy in policies().items()}, 2
        )
        assert [team.learning(version) for version in range(5)] == [
            ("solver",),
            ("solver",),
            ("checker",),
            ("checker",),
            ("solver",),
        ]


async def test_an_agent_that_decided_nothing_stands_still_and_keeps_up_with_the_version() -> None:
    members = policies()
    async with DeviceLane(1) as lane:
        learners = {name: Learner(policy, lane, CONFIG) for name, policy in members.items()}
        report = await LearnerTeam(learners).update(episodes(members)[1:], ADVANTAGES[1:])
    assert torch.equal(weights_of(members["solver"]), weights_of(policies()["solver"]))
    assert [learner.weight_version for learner in learners.values()] == [1, 1]
    told = {name: value for name, value in report.metrics.items() if name.startswith("solver/")}
    assert told == {"solver/update/trained": 0.0}


async def test_decisions_of_a_stranger_are_refused_by_name() -> None:
    members = policies()
    async with DeviceLane(1) as lane:
        team = LearnerTeam({"solver": Learner(members["solver"], lane, CONFIG)})
        with pytest.raises(
            ConfigError, match=r"agent 'checker' has no policy, there are policies for \['solver'\]"
        ):
            await team.update(episodes(members), ADVANTAGES)


async def test_each_reference_and_critic_is_asked_about_its_own_agent() -> None:
    members = policies()
    trajectories = episodes(members)
    async with DeviceLane(1) as lane:
        references = ReferenceTeam(
            {name: Reference(policy, lane, 8) for name, policy in members.items()}
        )
        scores = await references.log_probs(trajectories)
        for trajectory, rows in zip(trajectories, scores, strict=True):
            for step, row in zip(trajectory.steps, rows, strict=True):
                np.testing.assert_allclose(row, step.chunk.log_probs, atol=1e-5)
        critics = {
            name: Critic(policy, lane, CRITIC, seed)
            for seed, (name, policy) in enumerate(members.items())
        }
        team = CriticTeam(critics)
        returns = [np.array([1.0, -1.0, 1.0]), np.array([-1.0])]
        await team.fit_values(trajectories, await team.values(trajectories), returns)
        values = await team.values(trajectories)
        solver = await critics["solver"].values(
            [part.trajectory for part in split_by_agent(trajectories, "solver")]
        )
        checker = await critics["checker"].values(
            [part.trajectory for part in split_by_agent(trajectories, "checker")]
        )
        assert values[0].values.tolist() == [
            solver[0].values[0],
            checker[0].values[0],
            solver[0].values[1],
        ]
        assert values[1].values.tolist() == checker[1].values.tolist()
        # cut off after the solver's turn: its own critic says what was still to come
        assert values[0].bootstrap == solver[0].bootstrap != 0.0
        assert values[1].bootstrap == 0.0
        saved = await team.snapshot()
        await team.fit_values(trajectories, values, returns)
        await team.restore(saved)
        assert [each.values.tolist() for each in await team.values(trajectories)] == [
            each.values.tolist() for each in values
        ]


async def test_a_checkpoint_holds_all_members_and_comes_back_as_it_was(tmp_path: Path) -> None:
    members = policies()
    async with DeviceLane(1) as lane:
        team = LearnerTeam(
            {name: Learner(policy, lane, CONFIG) for name, policy in members.items()}
        )
        await team.update(episodes(members), ADVANTAGES)
        folder = await save_checkpoint(tmp_path, await team.snapshot(), {})
        state = (await load_checkpoint(folder)).state
        assert state.weight_version == 1
        others = policies()
        again = LearnerTeam(
            {name: Learner(policy, lane, CONFIG) for name, policy in others.items()}
        )
        await again.restore(state)
        assert again.weight_version == 1
        stranger = LearnerTeam({"judge": Learner(policies()["solver"], lane, CONFIG)})
        with pytest.raises(
            CheckpointError,
            match=r"agents \['checker', 'solver'\], expected the policies of agents \['judge'\]",
        ):
            await stranger.restore(state)
    for name in NAMES:
        assert torch.equal(weights_of(others[name]), weights_of(members[name]))
        loaded = CausalLanguageModel.load(folder / "agents" / name / "policy")
        assert torch.equal(weights_of(loaded), weights_of(members[name]))


async def test_a_name_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    async with DeviceLane(1) as lane:
        team = LearnerTeam({"../solver": Learner(policies()["solver"], lane, CONFIG)})
        with pytest.raises(
            ValueError, match=r"the name '\.\./solver' of a part or agent is not a word"
        ):
            await save_checkpoint(tmp_path, await team.snapshot(), {})


def test_a_team_of_nobody_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 learners"):
        LearnerTeam({})


async def test_a_team_of_one_learns_from_every_agent_as_its_learner_alone(tmp_path: Path) -> None:
    together, alone = policies()["solver"], policies()["solver"]
    trajectories = episodes(dict.fromkeys(NAMES, together))
    async with DeviceLane(1) as lane:
        team = LearnerTeam({SOLE_MEMBER: Learner(together, lane, CONFIG)})
        report = await team.update(trajectories, ADVANTAGES)
        expected = await Learner(alone, lane, CONFIG).update(trajectories, ADVANTAGES)
        folder = await save_checkpoint(tmp_path, await team.snapshot(), {})
        state = (await load_checkpoint(folder)).state
        await LearnerTeam({SOLE_MEMBER: Learner(alone, lane, CONFIG)}).restore(state)
        solver = LearnerTeam({"solver": Learner(alone, lane, CONFIG)})
        with pytest.raises(
            CheckpointError, match=r"has one policy for all agents, expected .* \['solver'\]"
        ):
            await solver.restore(state)
    assert torch.equal(weights_of(together), weights_of(alone))
    assert report.metrics.keys() == expected.metrics.keys()
    assert (folder / "policy" / "model.safetensors").is_file()
    assert not (folder / "agents").exists()
