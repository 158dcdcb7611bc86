"""Several policies learn in one run, each from its own agent's decisions."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from vla_rl.engines import EngineConfig
from vla_rl.envs.text import TextPoolConfig
from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.graph import Node, NodeOutput, Pipeline
from vla_rl.learner import CriticConfig, LearnerConfig, OptimizerConfig
from vla_rl.models.language import CausalLanguageModel, TinyConfig, tiny
from vla_rl.models.mlp import MlpConfig, MlpPolicy
from vla_rl.pipelines.config import RunConfig, TextTrainingConfig
from vla_rl.pipelines.registry import with_pipeline
from vla_rl.recipes.grpo_pair import AgentsConfig, GrpoPairConfig, load_policies
from vla_rl.recipes.grpo_text import training_starts
from vla_rl.reporting import RunDirectory
from vla_rl.rollout import ChatLimits, SchedulerConfig, TaskStart, chat_agent
from vla_rl.run.train import Outcome, train
from vla_rl.team.members import Member, RunEngines, Team
from vla_rl.types import SOLE_MEMBER, EnvSpec, Group

SHAPE = TinyConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=64,
    vocab_size=300,
    context_size=512,
)
STARTS = [
    TaskStart(env=EnvSpec(id="rewarded_texts:ChecksumPair"), task="checksum", seed=seed)
    for seed in range(4)
]


CRITIC = CriticConfig(
    optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0), micro_batch_tokens=1024, epochs=1
)


def config_of(
    root: Path, updates: int, pipeline: str = "grpo", **fields: Any
) -> TextTrainingConfig:
    config = TextTrainingConfig(
        run=RunConfig(
            name="pair", root=str(root), updates=updates, device="cpu", keep_checkpoints=9
        ),
        group_size=4,
        scheduler=SchedulerConfig(groups_per_update=2, max_staleness=0),
        text=TextPoolConfig(num_envs=8),
        chat=ChatLimits(max_turns=4, max_reply=4),
        engine=EngineConfig(max_batch=8, kept_conversations=16),
        learner=LearnerConfig(
            optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0), micro_batch_tokens=1024
        ),
        critic=CRITIC if pipeline == "ppo" else CriticConfig(),
    )
    return msgspec.structs.replace(with_pipeline(config, pipeline), **fields)


def policy(seed: int = 0) -> CausalLanguageModel:
    return tiny(SHAPE, ["go on"], seed=seed)


def test_a_policy_that_lacks_methods_is_refused_with_their_names() -> None:
    class Half:
        network = None

        def render(self) -> None: ...

    with pytest.raises(
        ConfigError,
        match=r"Half lacks checkpoint_files, .*vocabulary of vla_rl.engines.LanguageModel",
    ):
        Member(Half())  # type: ignore[arg-type]


def pair(updates_per_turn: int | None = None) -> Team:
    return Team({"left": Member(policy(1)), "right": Member(policy(2))}, updates_per_turn)


async def run(
    config: TextTrainingConfig, model: CausalLanguageModel | Team, **options: Any
) -> Outcome:
    return await train(
        config, STARTS, model, agent=functools.partial(chat_agent, limits=config.chat), **options
    )


def weights_of(folder: Path) -> torch.Tensor:
    return torch.cat(
        [
            tensor.float().flatten()
            for _, tensor in sorted(load_file(folder / "model.safetensors").items())
        ]
    )


def initial_weights(model: CausalLanguageModel, folder: Path) -> torch.Tensor:
    model.save(folder)
    return weights_of(folder)


class Looking:
    """A node behind the advantages that keeps what it sees."""

    def __init__(self) -> None:
        self.updates: list[tuple[list[Group], list[np.ndarray]]] = []

    async def __call__(
        self, groups: Sequence[Group], advantages: Sequence[np.ndarray]
    ) -> NodeOutput:
        self.updates.append((list(groups), list(advantages)))
        return NodeOutput(values={})

    def into(self, pipeline: Pipeline) -> Pipeline:
        return pipeline.insert_after(
            "advantage", Node.declare("look", self, reads=("groups", "advantages"))
        )


@pytest.mark.parametrize("has_own_weights", [True, pytest.param(False, marks=pytest.mark.proof)])
async def test_each_agent_gets_the_advantages_of_its_own_returns(
    tmp_path: Path, has_own_weights: bool
) -> None:
    looking = Looking()
    model = pair() if has_own_weights else policy()
    outcome = await run(config_of(tmp_path, updates=2), model, customise=looking.into)
    assert outcome.progress.num_episodes == 16
    assert len(looking.updates) == 2
    num_different = 0
    for groups, advantages in looking.updates:
        rows = iter(advantages)
        for group in groups:
            # by the environment's own account of who earned what, and GRPO's formula written out
            earned = {
                agent: np.array([member.info["rewards"][agent] for member in group.trajectories])
                for agent in ("left", "right")
            }
            expected = {
                agent: (each - each.mean()) / (each.std(ddof=1) + 1e-6)
                if np.ptp(each)
                else np.zeros(4)
                for agent, each in earned.items()
            }
            num_different += int(np.abs(expected["left"] - expected["right"]).max() > 0.1)
            for number, member in enumerate(group.trajectories):
                row = next(rows)
                assert {step.agent for step in member.steps} == {"left", "right"}
                np.testing.assert_allclose(
                    row, [expected[step.agent][number] for step in member.steps], atol=1e-5
                )
    assert num_different >= 2


async def test_who_waits_for_its_turn_stays_as_it_is(tmp_path: Path) -> None:
    team = pair(updates_per_turn=1)
    before = {
        name: initial_weights(member.model, tmp_path / name)
        for name, member in team.members.items()
    }  # type: ignore[arg-type]
    outcome = await run(config_of(tmp_path, updates=2), team)
    folders = {
        update: outcome.run.checkpoints / f"update-00000{update}" / "agents" for update in (1, 2)
    }
    after = {
        (name, update): weights_of(folders[update] / name / "policy")
        for name in ("left", "right")
        for update in (1, 2)
    }
    assert not torch.equal(after["left", 1], before["left"])
    assert torch.equal(after["right", 1], before["right"])
    assert torch.equal(after["left", 2], after["left", 1])
    assert not torch.equal(after["right", 2], after["right", 1])
    # neither moved its optimizer in the other's turn
    first = load_file(folders[1] / "left" / "optimizer.safetensors")
    second = load_file(folders[2] / "left" / "optimizer.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)


async def test_together_both_learn_in_every_update(tmp_path: Path) -> None:
    team = pair()
    before = {
        name: initial_weights(member.model, tmp_path / name)
        for name, member in team.members.items()
    }  # type: ignore[arg-type]
    outcome = await run(config_of(tmp_path, updates=1), team)
    folder = outcome.run.checkpoints / "update-000001" / "agents"
    for name in ("left", "right"):
        assert not torch.equal(weights_of(folder / name / "policy"), before[name])


@pytest.mark.parametrize("updates_per_turn", [pytest.param(None, marks=pytest.mark.proof), 1])
async def test_a_team_goes_on_from_its_checkpoint(
    tmp_path: Path, updates_per_turn: int | None
) -> None:
    first = await run(config_of(tmp_path, updates=1), pair(updates_per_turn))
    folder = first.run.checkpoints / "update-000001" / "agents"
    # the checkpoint of one agent is a policy by itself
    loaded = CausalLanguageModel.load(folder / "right" / "policy")
    assert torch.equal(
        initial_weights(loaded, tmp_path / "again"), weights_of(folder / "right" / "policy")
    )
    resumed = await run(
        config_of(tmp_path, updates=2),
        pair(updates_per_turn),
        resume=RunDirectory.resume(first.run.path),
    )
    lines = [
        msgspec.json.decode(line)
        for line in (resumed.run.path / "metrics.jsonl").read_bytes().splitlines()
    ]
    assert [int(line["update"]) for line in lines] == [1, 2]
    # by turns, it is the second one's turn now
    assert ("left/update/loss" in lines[1], "right/update/loss" in lines[1]) == (
        updates_per_turn is None,
        True,
    )


async def test_one_policy_and_a_team_cannot_go_on_from_each_others_checkpoints(
    tmp_path: Path,
) -> None:
    of_team = await run(config_of(tmp_path / "team", updates=1), pair())
    with pytest.raises(
        CheckpointError, match=r"of agents \['left', 'right'\], expected one policy for all agents"
    ):
        await run(
            config_of(tmp_path, updates=2), policy(), resume=RunDirectory.resume(of_team.run.path)
        )
    of_one = await run(config_of(tmp_path / "one", updates=1), policy())
    with pytest.raises(
        CheckpointError,
        match=r"one policy for all agents, expected .* of agents \['left', 'right'\]",
    ):
        await run(
            config_of(tmp_path, updates=2), pair(), resume=RunDirectory.resume(of_one.run.path)
        )


@pytest.mark.parametrize("has_own_weights", [pytest.param(True, marks=pytest.mark.proof), False])
async def test_marfts_advantages_can_be_chosen(tmp_path: Path, has_own_weights: bool) -> None:
    config = config_of(tmp_path, updates=1, pipeline="ppo")
    config = msgspec.structs.replace(
        config, advantage=msgspec.structs.replace(config.advantage, name="marft_gae")
    )
    looking = Looking()
    outcome = await run(config, pair() if has_own_weights else policy(), customise=looking.into)
    ((groups, advantages),) = looking.updates
    members = [member for group in groups for member in group.trajectories]
    for agent in ("left", "right"):  # whitened for each agent alone
        own = [
            row[index]
            for member, row in zip(members, advantages, strict=True)
            for index, step in enumerate(member.steps)
            if step.agent == agent
        ]
        assert np.mean(own) == pytest.approx(0.0, abs=1e-5)
    again = await run(
        msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, updates=2)),
        pair() if has_own_weights else policy(),
        resume=RunDirectory.resume(outcome.run.path),
    )
    assert again.progress.update == 2


async def test_a_kl_term_asks_each_agents_own_reference(tmp_path: Path) -> None:
    config = config_of(tmp_path, updates=2)
    loss = msgspec.structs.replace(
        config.learner.loss, kl=msgspec.structs.replace(config.learner.loss.kl, coef=0.1)
    )
    outcome = await run(
        msgspec.structs.replace(config, learner=msgspec.structs.replace(config.learner, loss=loss)),
        pair(),
    )
    lines = [
        msgspec.json.decode(line)
        for line in (outcome.run.path / "metrics.jsonl").read_bytes().splitlines()
    ]
    for name in ("left", "right"):
        assert lines[0][f"{name}/update/reference_kl"] == pytest.approx(0.0, abs=1e-6)
        assert lines[1][f"{name}/update/reference_kl"] > 0.0


async def test_a_team_that_lacks_an_agent_says_whose_policy_is_missing(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"the turn of agent 'right', but there are policies for \['left'\]"
    ):
        await run(config_of(tmp_path, updates=1), Team({"left": Member(policy())}))


def test_one_policy_cannot_take_turns_with_itself() -> None:
    with pytest.raises(
        ConfigError, match=r"AgentsConfig\.turns is 'alternating', expected 'joint'"
    ):
        AgentsConfig(turns="alternating")


async def test_the_recipe_runs_a_pair_with_weights_of_their_own(tmp_path: Path) -> None:
    policy().save(tmp_path / "base")
    config = GrpoPairConfig(
        run=RunConfig(name="pair", root=str(tmp_path), updates=1, device="cpu"),
        agents=AgentsConfig(weights="own", turns="alternating"),
        group_size=2,
        scheduler=SchedulerConfig(groups_per_update=1, max_staleness=0),
        text=TextPoolConfig(num_envs=2),
        chat=ChatLimits(max_turns=3, max_reply=4),
        policy=str(tmp_path / "base"),
    )
    team = load_policies(config)
    assert list(team.members) == ["solver", "checker"]
    assert team.updates_per_turn == 2
    assert team.members["solver"].model is not team.members["checker"].model
    agent = functools.partial(chat_agent, limits=config.chat)
    outcome = await train(config, training_starts(config), team, agent=agent)
    assert outcome.progress.num_episodes == 2


def mlp_policy() -> MlpPolicy:
    return MlpPolicy.create(
        MlpConfig(state_size=4, action_low=(-1.0,), action_high=(1.0,), num_bins=3), seed=0
    )


class Remote:
    """An engine in a process of its own, as far as its metrics are read."""

    weight_version = 0

    def metrics(self) -> dict[str, float]:
        return {"engine/queued": 2.0}


def test_one_policy_is_a_team_of_one_and_a_team_is_itself() -> None:
    model = mlp_policy()
    team = Team.of(model)
    assert {name: member.model for name, member in team.members.items()} == {SOLE_MEMBER: model}
    assert team.agent_names.acts_for_all
    assert Team.of(team) is team


def test_the_bytes_of_a_team_are_those_of_all_its_members() -> None:
    one = Team.of(mlp_policy()).memory_bytes
    two = Team({"left": Member(mlp_policy()), "right": Member(mlp_policy())}).memory_bytes
    assert two == (2 * one[0], 2 * one[1])
    assert one[0] > 0


def test_a_team_without_members_is_refused() -> None:
    with pytest.raises(ConfigError, match="the team has no members"):
        Team({})


def test_metrics_of_engines_name_their_member_unless_there_is_one() -> None:
    engines = RunEngines({SOLE_MEMBER: Remote()})  # type: ignore[dict-item]
    assert engines.metrics() == {"engine/queued": 2.0}
    pair = RunEngines({"left": Remote(), "right": Remote()})  # type: ignore[dict-item]
    assert pair.metrics() == {"left/engine/queued": 2.0, "right/engine/queued": 2.0}
