"""The built-in pipelines: each trains, each can be changed, each draws.

Names and settings that cannot work are refused.
"""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from small_episodes import make_drawing_policy, trajectory

from vla_rl.algorithms import (
    AdvantageConfig,
    EmbeddingConfig,
    KlLossConfig,
    PolicyLossConfig,
    ReferenceBank,
    SrpoConfig,
)
from vla_rl.algorithms.filters import OverlongConfig
from vla_rl.algorithms.kl import KlRewardConfig
from vla_rl.cli.command_line import TrainingLaunch, parse_command
from vla_rl.engines import EngineConfig
from vla_rl.env_workers import SimulatorConfig
from vla_rl.errors import ConfigError
from vla_rl.graph import Node, NodeOutput, NodeRole, Pipeline, TaskGraph
from vla_rl.learner import CriticConfig, LearnerConfig
from vla_rl.models.mlp import MlpPolicy
from vla_rl.pipelines.config import FilterConfig, RunConfig, TrainingConfig
from vla_rl.pipelines.embodied_srpo import reward_by_progress
from vla_rl.pipelines.nodes.rewards import GroupReward, RewardConfig
from vla_rl.pipelines.registry import PIPELINES, merge_tables, pipeline_settings, with_pipeline
from vla_rl.recipes import off_policy_toy
from vla_rl.recipes.train_toy import REACH, TrainToyConfig, new_policy, training_starts
from vla_rl.reporting import RunDirectory, read_metrics
from vla_rl.rollout import SchedulerConfig
from vla_rl.run.train import TrainingRun, train
from vla_rl.types import Group, StopReason

# off_policy trains heads alone: tests/run/test_off_policy.py
OF_WEIGHTS = sorted(set(PIPELINES) - {"off_policy"})
NEEDS_IMAGES = frozenset({"embodied_srpo", "embodied_grpo", "embodied_ppo", "nft"})


def small(pipeline: str, root: Path, **changes: Any) -> TrainToyConfig:
    """Two synchronous, deterministic updates of two groups of three episodes of at most eight
    control steps.
    """
    config = TrainToyConfig(
        run=RunConfig(
            name=pipeline,
            root=str(root),
            updates=2,
            videos_every=1 if pipeline in NEEDS_IMAGES else 5,
        ),
        group_size=3,
        num_starts=4,
        step_limit=8,
        chunk_size=2,
        simulators=SimulatorConfig(num_envs=2, envs_per_process=2),
        scheduler=SchedulerConfig(groups_per_update=2, max_staleness=0, deterministic=True),
        engine=EngineConfig(is_deterministic=True),
        embedding=EmbeddingConfig(encoder="state"),
        env_id=REACH if pipeline in NEEDS_IMAGES else "Pendulum-v1",
    )
    return with_pipeline(msgspec.structs.replace(config, **changes), pipeline)


def make_policy(config: TrainToyConfig) -> MlpPolicy:
    """The recipe's policy, or one with the predictions of a flow for the pipeline that needs them."""
    policy = new_policy(config)
    return make_drawing_policy(0, policy.config) if config.pipeline == "nft" else policy


def run_of(config: TrainToyConfig, **options: Any) -> TrainingRun:
    return TrainingRun(config, training_starts(config), make_policy(config), **options)


async def trained(
    config: TrainToyConfig, **options: Any
) -> tuple[list[dict[str, float]], MlpPolicy, RunDirectory]:
    policy = make_policy(config)
    async with asyncio.timeout(110):
        outcome = await train(config, training_starts(config), policy, **options)
    return list(read_metrics(outcome.run.metrics)), policy, outcome.run


def weights(policy: MlpPolicy) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in policy.network.parameters()])


@pytest.mark.parametrize("pipeline", OF_WEIGHTS)
async def test_every_pipeline_makes_updates_that_begin_at_ratio_one(
    pipeline: str, tmp_path: Path
) -> None:
    single_step = LearnerConfig(micro_batch=5)
    config = small(pipeline, tmp_path, learner=single_step)
    metrics, policy, run = await trained(config)
    assert [line["update"] for line in metrics] == [1, 2]
    trained_lines = [line for line in metrics if line["update/trained"]]
    assert all(line["update/ratio_mean"] == pytest.approx(1.0, abs=1e-4) for line in trained_lines)
    assert all(line["update/log_prob_gap_max"] < 1e-4 for line in trained_lines)
    assert all(line["update/staleness_max"] == 0.0 for line in metrics)
    # groups of the sparse task may have no success at all, and then there is nothing to learn
    assert bool(trained_lines) == (not torch.equal(weights(policy), weights(make_policy(config))))
    assert trained_lines or pipeline in NEEDS_IMAGES
    # Pendulum never reports success, the reaching task does
    assert ("rollout/success_rate" in metrics[0]) == (pipeline in NEEDS_IMAGES)
    # a later update may have no episode since the last one
    assert "rollout/mean_return" in metrics[0]
    assert ("critic/loss" in metrics[0]) == (pipeline in ("ppo", "embodied_ppo"))
    assert bool(list(run.videos.glob("*.mp4"))) == (pipeline in NEEDS_IMAGES)


async def seen_only(rewards: Sequence[Any] | np.ndarray, seen: list[Any]) -> NodeOutput:
    seen.append(rewards)
    return NodeOutput(values={}, metrics={"mine/looked": 1.0})


async def reward_by_number(groups: Sequence[Group]) -> np.ndarray:
    return np.arange(sum(len(group.trajectories) for group in groups), dtype=np.float32)


@pytest.mark.parametrize("pipeline", OF_WEIGHTS)
def test_a_node_can_be_inserted_into_and_replaced_in_every_pipeline(
    pipeline: str, tmp_path: Path
) -> None:
    def change(built: Pipeline) -> Pipeline:
        built.replace_node("reward", reward_by_number, reads="groups", stream=False)
        return built.insert_after(
            "reward", Node.declare("mine", seen_only, reads="rewards", config={"seen": []})
        )

    changed, plain = (
        run_of(small(pipeline, tmp_path), customise=change).graph,
        run_of(small(pipeline, tmp_path)).graph,
    )
    assert changed.id == plain.id == pipeline
    assert set(changed.nodes) - set(plain.nodes) == {"mine"}
    assert "mine" in changed.upstream("update")


async def test_what_a_replaced_node_gives_is_what_is_learnt_from(tmp_path: Path) -> None:
    seen: list[Any] = []

    def change(built: Pipeline) -> Pipeline:
        built.replace_node("reward", reward_by_number, reads="groups", stream=False)
        return built.insert_after(
            "reward", Node.declare("mine", seen_only, reads="rewards", config={"seen": seen})
        )

    metrics, _, _ = await trained(small("grpo", tmp_path), customise=change)
    assert [rewards.tolist() for rewards in seen] == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 2
    # of three rewards 0, 1, 2 the advantages are -1, 0, 1
    assert metrics[0]["advantage/max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics[0]["mine/looked"] == 1.0


@pytest.mark.parametrize("pipeline", OF_WEIGHTS)
def test_every_pipeline_draws(pipeline: str, tmp_path: Path) -> None:
    graph = run_of(small(pipeline, tmp_path)).graph
    drawn = graph.draw(tmp_path / "graph.svg")
    assert all(node in drawn.read_text() for node in graph.nodes)


def test_a_pipeline_of_ones_own_is_named_by_its_function(tmp_path: Path) -> None:
    config = small("grpo", tmp_path)
    own = msgspec.structs.replace(config, pipeline="own_parts:without_checkpoints")
    assert "checkpoint" not in run_of(own).graph.nodes
    # of its SETTINGS
    assert with_pipeline(config, "own_parts:without_checkpoints").temperature == 1.5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("grpoo", "did you mean 'grpo'"),
        ("own_parts:withot_checkpoints", "did you mean 'without_checkpoints'"),
        ("no_such_module:pipeline", "no_such_module"),
    ],
)
def test_an_unknown_pipeline_is_refused_with_the_nearest(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_pipeline(TrainToyConfig(), name)


@pytest.mark.parametrize(
    ("pipeline", "change", "message"),
    [
        ("gspo", {"learner": LearnerConfig()}, "'gspo' in the pipeline gspo"),
        ("cpgd", {"learner": LearnerConfig()}, "'cpgd' in the pipeline cpgd"),
        ("ppo", {"advantage": AdvantageConfig()}, "'gae' or 'marft_gae'"),
        ("dapo", {"filter": FilterConfig()}, "dynamic sampling"),
    ],
)
def test_settings_that_take_away_what_a_pipeline_is_are_refused(
    pipeline: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = msgspec.structs.replace(small(pipeline, tmp_path), **change)
    with pytest.raises(ConfigError, match=message):
        run_of(config)


def test_srpo_is_refused_where_nothing_says_how_videos_are_embedded(tmp_path: Path) -> None:
    toy = small("grpo", tmp_path)
    plain = TrainingConfig(
        pipeline="embodied_srpo",
        scheduler=toy.scheduler,
        engine=toy.engine,
        simulators=toy.simulators,
    )
    with pytest.raises(ConfigError, match="expected an EmbodiedConfig"):
        TrainingRun(plain, training_starts(toy), new_policy(toy))


def test_a_loss_without_a_trust_region_is_refused_where_it_would_see_data_of_older_weights(
    tmp_path: Path,
) -> None:
    config = small("grpo", tmp_path, learner=LearnerConfig(loss=PolicyLossConfig(name="ppo")))
    unbounded = msgspec.structs.replace(
        config, learner=LearnerConfig(loss=PolicyLossConfig(name="gpg"))
    )
    assert unbounded.scheduler.max_staleness == 0
    ahead = SchedulerConfig(groups_per_update=2, max_staleness=1)
    with pytest.raises(ConfigError, match="no trust region"):
        msgspec.structs.replace(unbounded, scheduler=ahead, engine=EngineConfig())
    with pytest.raises(ConfigError, match="an update has several optimizer steps"):
        msgspec.structs.replace(
            unbounded, learner=msgspec.structs.replace(unbounded.learner, epochs=8)
        )


@pytest.mark.parametrize(
    ("learner", "in_reward", "nodes"),
    [
        (LearnerConfig(), KlRewardConfig(), set()),
        (
            LearnerConfig(loss=PolicyLossConfig(kl=KlLossConfig(coef=0.1))),
            KlRewardConfig(),
            {"reference"},
        ),
        (LearnerConfig(), KlRewardConfig(coef=0.1), {"reference", "kl"}),
    ],
)
def test_a_reference_policy_exists_only_where_its_coefficient_is_above_0(
    learner: LearnerConfig, in_reward: KlRewardConfig, nodes: set[str], tmp_path: Path
) -> None:
    config = msgspec.structs.replace(
        small("grpo", tmp_path), learner=learner, kl_in_reward=in_reward
    )
    graph = run_of(config).graph
    assert set(graph.nodes) & {"reference", "kl"} == nodes
    assert len(graph.nodes_by_role(NodeRole.REFERENCE)) == len(nodes & {"reference"})


@pytest.mark.parametrize("pipeline", OF_WEIGHTS)
def test_the_kl_node_reads_the_reward_and_the_advantage_reads_what_it_leaves(
    pipeline: str, tmp_path: Path
) -> None:
    penalised = KlRewardConfig(coef=0.1)
    config = msgspec.structs.replace(small(pipeline, tmp_path), kl_in_reward=penalised)
    graph = run_of(config).graph
    before = "shaped" if pipeline == "dapo" else "rewards"
    assert graph.node("kl").reads["rewards"] == before
    assert graph.node("advantage").reads["rewards"] == "rewards_less_kl"


async def test_an_interrupted_run_goes_on_with_its_critic_and_its_kl_coefficient(
    tmp_path: Path,
) -> None:
    adaptive = KlRewardConfig(coef=0.1, target=1.0, horizon=10)
    config = msgspec.structs.replace(small("ppo", tmp_path / "whole"), kl_in_reward=adaptive)
    metrics, whole, _ = await trained(config)
    # nothing has moved yet
    assert metrics[0]["reward/reference_kl"] == pytest.approx(0.0, abs=1e-6)
    # far below the target: 0.1 * (1 - 0.2 * 6 / 10), as there are 6 episodes
    assert metrics[1]["reward/kl_coef"] == pytest.approx(0.088)
    one = msgspec.structs.replace(small("ppo", tmp_path / "half").run, updates=1)
    _, _, run = await trained(msgspec.structs.replace(config, run=one))
    resumed, rest, _ = await trained(config, resume=RunDirectory.resume(run.path))
    assert resumed[-1]["reward/kl_coef"] == metrics[1]["reward/kl_coef"]
    assert torch.equal(weights(whole), weights(rest))


async def test_remax_runs_one_greedy_episode_more_in_each_group_and_needs_no_company(
    tmp_path: Path,
) -> None:
    config = small("grpo", tmp_path)
    config = msgspec.structs.replace(config, advantage=AdvantageConfig(name="remax"), group_size=1)
    metrics, _, _ = await trained(config)
    # two groups of one sampled and one greedy episode of four decisions each; the greedy ones are
    # not learnt from
    assert [line["update/decisions"] for line in metrics] == [8.0, 8.0]


def test_settings_that_a_pipeline_would_not_read_are_refused(tmp_path: Path) -> None:
    by_hand = RewardConfig(function="success")
    cases: list[tuple[str, dict[str, Any], str]] = [
        (
            "embodied_srpo",
            {"reward": by_hand},
            "reward.function is 'success'.*makes its own reward",
        ),
        (
            "gspo",
            {"overlong": OverlongConfig(max_length=600)},
            "max_length is 600, but pipeline 'gspo' has no node",
        ),
        (
            "embodied_srpo",
            {"critic": CriticConfig(trunk="shared")},
            "critic.trunk is 'shared', but pipeline 'embodied_srpo' has no critic; leave",
        ),
        (
            "grpo",
            {"critic": CriticConfig(warmup_updates=3)},
            "critic.warmup_updates is 3, but pipeline 'grpo' has no critic",
        ),
        (
            "ppo",
            {"run": RunConfig(root=str(tmp_path), videos_every=2)},
            "run.videos_every is 2, but pipeline 'ppo' makes no videos; leave it unset, or use",
        ),
    ]
    for pipeline, changes, message in cases:
        with pytest.raises(ConfigError, match=message):
            run_of(small(pipeline, tmp_path, **changes))


def test_settings_of_a_recipe_are_no_choice_of_its_user() -> None:
    run_of(with_pipeline(TrainToyConfig(), "grpo"))


def with_entropy_bonus(config: TrainToyConfig) -> TrainToyConfig:
    """A loss that moves the weights whatever the advantages are."""
    return msgspec.structs.replace(
        config, learner=msgspec.structs.replace(config.learner, entropy_coef=0.01)
    )


async def test_where_every_episode_was_cut_off_and_those_are_masked_nothing_moves(
    tmp_path: Path,
) -> None:
    # Pendulum never ends by itself
    config = small("grpo", tmp_path, filter=FilterConfig(mask_truncated=True))
    config = with_entropy_bonus(config)
    metrics, policy, _ = await trained(config)
    assert [line["update/trained"] for line in metrics] == [0.0, 0.0]
    assert torch.equal(weights(policy), weights(make_policy(config)))


async def test_a_critic_is_warmed_up_before_the_policy_moves(tmp_path: Path) -> None:
    config = with_entropy_bonus(small("ppo", tmp_path))
    waiting = msgspec.structs.replace(
        config, critic=msgspec.structs.replace(config.critic, warmup_updates=2)
    )
    metrics, policy, run = await trained(waiting)
    assert torch.equal(weights(policy), weights(make_policy(config)))
    assert [line["update/trained"] for line in metrics] == [0.0, 0.0]
    assert metrics[0]["critic/grad_norm"] > 0.0
    assert (run.checkpoints / "update-000002" / "critic.safetensors").exists()


def test_the_command_line_overrides_the_file_which_overrides_the_pipeline(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'pipeline = "dapo"\n[learner]\nmicro_batch = 7\n[learner.loss]\nclip_high = 0.5\n'
    )
    arguments = ["--config", str(file), "--learner.loss.clip-low", "0.1"]
    config = parse_command(TrainingLaunch, TrainToyConfig, "Any pipeline.", arguments).config
    assert config.pipeline == "dapo"
    assert (config.learner.loss.clip_low, config.learner.loss.clip_high) == (0.1, 0.5)
    assert config.learner.aggregation == "token_mean"  # of the pipeline
    assert config.learner.micro_batch == 7
    assert config.group_size == 8  # of the recipe
    ppo = parse_command(
        TrainingLaunch, TrainToyConfig, "Any pipeline.", [*arguments[:2], "--pipeline", "ppo"]
    ).config
    assert (ppo.pipeline, ppo.advantage.name, ppo.filter.drop_equal) == ("ppo", "gae", "none")
    with pytest.raises(ConfigError, match="did you mean 'cpgd'"):
        parse_command(TrainingLaunch, TrainToyConfig, "Any pipeline.", ["--pipeline", "cpdg"])


def test_numbers_of_one_loss_are_not_taken_over_by_another() -> None:
    loss = {"name": "sapo", "temperature_positive": 2.0, "kl": {"coef": 0.1}}
    on_top = merge_tables({"learner": {"loss": loss, "epochs": 3}}, pipeline_settings("gspo"))
    assert on_top["learner"] == {
        "loss": {"name": "gspo", "kl": {"coef": 0.1}},
        "epochs": 3,
        "aggregation": "seq_mean_token_mean",
    }


# test_what_pays_is_learnt_from_random_weights is what the suite learns in a whole run
@pytest.mark.proof
@pytest.mark.parametrize("pipeline", ["grpo", "ppo"])
async def test_a_pole_is_balanced_longer_after_a_few_updates(pipeline: str, tmp_path: Path) -> None:
    config = TrainToyConfig(
        run=RunConfig(name=pipeline, root=str(tmp_path), updates=7, checkpoint_every=7),
        step_limit=100,
        chunk_size=2,
        simulators=SimulatorConfig(num_envs=2),
        scheduler=SchedulerConfig(groups_per_update=4, max_staleness=0),
    )
    metrics, _, _ = await trained(with_pipeline(config, pipeline))
    rewards = [line["reward/mean"] for line in metrics]
    # a random policy holds it for about 20 of 100 control steps, each worth 0.01
    assert rewards[0] < 0.3
    assert np.mean(rewards[-2:]) > rewards[0] + 0.2


PAGES = Path(__file__).parents[2] / "docs" / "pipelines"


def config_of(pipeline: str) -> TrainToyConfig:
    toy = msgspec.structs.replace(TrainToyConfig(), embedding=EmbeddingConfig(encoder="state"))
    return with_pipeline(toy, pipeline)


def graph_of(pipeline: str) -> TaskGraph:
    if pipeline == "off_policy":
        heads = off_policy_toy.OffPolicyToyConfig()
        starts = off_policy_toy.training_starts(heads)
        return TrainingRun(heads, starts, off_policy_toy.new_policy(heads)).graph
    config = config_of(pipeline)
    return TrainingRun(config, training_starts(config), make_policy(config)).graph


@pytest.mark.parametrize("pipeline", sorted(PIPELINES))
def test_every_pipeline_has_a_page_with_the_drawing_of_its_graph(pipeline: str) -> None:
    graph = graph_of(pipeline)
    (drawing,) = re.findall(
        r"```mermaid\n(.*?)```", (PAGES / f"{pipeline}.md").read_text(), re.DOTALL
    )
    assert drawing.strip() == graph.mermaid().strip()
    assert f"({pipeline}.md)" in (PAGES / "README.md").read_text()


def test_the_reward_and_the_pipeline_that_the_page_shows_can_be_named(import_folder: Path) -> None:
    blocks = re.findall(
        r"```python\n# (\w+\.py)\n(.*?)```", (PAGES / "README.md").read_text(), re.DOTALL
    )
    assert [name for name, _ in blocks] == ["my_rewards.py", "my_pipelines.py"]
    for name, text in blocks:
        (import_folder / name).write_text(text)
    GroupReward(RewardConfig(function="my_rewards:short", manager="my_rewards:best_of_group"))
    config = config_of("my_pipelines:watched")
    graph = TrainingRun(config, training_starts(config), make_policy(config)).graph
    assert "look" in graph.nodes
    assert (config.advantage.name, config.learner.epochs) == ("rloo", 2)


def test_the_commands_that_the_pages_name_exist() -> None:
    recipes = Path(__file__).parents[2] / "vla_rl" / "recipes"
    for page in PAGES.glob("*.md"):
        for module in set(re.findall(r"-m vla_rl\.recipes\.(\w+)", page.read_text())):
            assert (recipes / f"{module}.py").is_file(), module
        for other in re.findall(r"\]\(([\w/.]+\.md)\)", page.read_text()):
            assert (PAGES / other).is_file(), other


DISTANT, NEAR, NEARER = ([[distance]] for distance in (9.0, 1.0, 0.5))
GOAL = [[0.0]]


def group(number: int, *solved: bool) -> Group:
    members = []
    for member, success in enumerate(solved):
        stop = StopReason.SUCCESS if success else StopReason.TERMINATED
        made = trajectory([[0.0]], member, stop, {"is_success": success, "score": {"total": 0.5}})
        spec = msgspec.structs.replace(
            made.episode, group_id=number, episode_id=10 * number + member
        )
        members.append(msgspec.structs.replace(made, episode=spec))
    return Group(group_id=number, trajectories=tuple(members), dispatch_version=0)


GROUPS = [group(0, True, False, False), group(1, False, False)]
EMBEDDINGS = [np.array([GOAL, NEAR, DISTANT], np.float32), np.array([NEARER, DISTANT], np.float32)]


async def rewarded(config: SrpoConfig, bank: ReferenceBank) -> tuple[list[list[float]], NodeOutput]:
    output = await reward_by_progress(0, GROUPS, EMBEDDINGS, config, bank)
    return [[float(each.sum()) for each in of_group] for of_group in output.batch], output


async def test_failures_are_compared_with_the_successes_of_all_groups_of_their_task() -> None:
    bank = ReferenceBank(4)
    ((success, near, distant), (nearer, other_distant)), _ = await rewarded(SrpoConfig(), bank)
    assert success == 1.0
    assert nearer > near > distant == other_distant > 0.0
    assert list(bank.state()) == ["none"]


async def test_failures_are_compared_with_the_successes_of_their_own_group_if_asked() -> None:
    bank = ReferenceBank(0)
    ((success, near, distant), without), _ = await rewarded(SrpoConfig(references="group"), bank)
    assert success == 1.0 > near > distant
    assert without == [0.0, 0.0]  # its group has no success
    assert bank.state() == {}


async def test_the_parts_of_an_environments_score_are_metrics_of_srpo_too() -> None:
    _, output = await rewarded(SrpoConfig(), ReferenceBank(4))
    assert output.metrics["score/total"] == 0.5
    assert output.metrics["reward/success_rate"] == 0.2
