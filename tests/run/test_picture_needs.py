"""Pictures pass the control process by only if the learner's ranks alone read them."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from vla_rl.actors import make_keys
from vla_rl.algorithms import EmbeddingConfig
from vla_rl.cluster.config import ClusterConfig
from vla_rl.engines import EngineConfig
from vla_rl.envs.text import TextPoolConfig
from vla_rl.graph import Pipeline
from vla_rl.models.language import TinyConfig, tiny
from vla_rl.pipelines.config import TextTrainingConfig
from vla_rl.pipelines.nodes.rewards import RewardConfig
from vla_rl.pipelines.parts import Parts
from vla_rl.pipelines.registry import PIPELINES, with_pipeline
from vla_rl.recipes.train_toy import REACH, TrainToyConfig, policy_of, starts_of
from vla_rl.rollout import TaskStart
from vla_rl.run.training_run import TrainingRun
from vla_rl.types import EnvSpec

DIRECTLY = "pictures go from the hosts to the learner ranks directly"
THROUGH = "pictures go through this process: "


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    make_keys(tmp_path)
    key = (tmp_path / "server.pub").read_text().strip()
    table = f'[[host]]\nname = "a"\naddress = "tcp://127.0.0.1:9"\npublic_key = "{key}"\n'
    (tmp_path / "hosts.toml").write_text(f'client_key = "client.key"\n{table}')
    return tmp_path / "hosts.toml"


def way_of(
    hosts: Path,
    pipeline: str,
    num_ranks: int = 2,
    customise: Any = lambda same: same,
    **changes: Any,
) -> str:
    """Build a run, which opens nothing; return the way of its pictures."""
    config = TrainToyConfig(
        cluster=ClusterConfig(hosts=str(hosts)),
        env_id=REACH,
        embedding=EmbeddingConfig(encoder="state"),
    )
    config = with_pipeline(config, pipeline)
    learner = msgspec.structs.replace(config.learner, ranks=num_ranks)
    config = msgspec.structs.replace(config, learner=learner, **changes)
    return way(TrainingRun(config, starts_of(config), policy_of(config), customise=customise))


def way(training: TrainingRun) -> str:
    rollout = training._parts.hosts
    assert rollout is not None
    assert rollout.pictures.has_shelves == (rollout.picture_way == DIRECTLY)
    return rollout.picture_way


@pytest.mark.parametrize("pipeline", sorted(PIPELINES))
def test_no_pipeline_of_ours_reads_pictures_in_the_control_process(
    pipeline: str, hosts: Path
) -> None:
    assert way_of(hosts, pipeline) == DIRECTLY


def test_hosts_whose_engines_are_processes_of_vllm_embed_what_they_hand_over(hosts: Path) -> None:
    assert way_of(hosts, "embodied_srpo", engine=EngineConfig(kind="vllm")) == DIRECTLY


def test_one_process_that_learns_gets_its_pictures_as_ever(hosts: Path) -> None:
    assert way_of(hosts, "embodied_grpo", num_ranks=1) == ""


def test_a_reward_of_ones_own_gets_the_pictures(hosts: Path) -> None:
    reward = RewardConfig(function="vla_rl.remote_rollout.episode_store:observed_bytes")
    expected = f"{THROUGH}the node 'reward' may read them"
    assert way_of(hosts, "embodied_grpo", reward=reward) == expected


async def look(episodes: Any) -> None:
    """A node of one's own."""


def test_a_node_of_ones_own_gets_the_pictures_whatever_their_name(hosts: Path) -> None:
    def looked_at(pipeline: Pipeline) -> Pipeline:
        return pipeline.add_node("look", look, reads={"episodes": "groups"})

    expected = f"{THROUGH}the node 'look' may read them"
    assert way_of(hosts, "grpo", customise=looked_at) == expected
    assert way_of(hosts, f"{__name__}:renamed") == expected


def renamed(parts: Parts) -> Pipeline:
    """A pipeline whose groups have another name."""
    pipeline = Pipeline("renamed", "other names", inputs="update")
    pipeline.add_node("rollout", parts.collect, reads="update", writes="seen")
    return pipeline.add_node("look", look, reads={"episodes": "seen"})


def test_conversations_are_compared_in_the_control_process(hosts: Path) -> None:
    config = TextTrainingConfig(
        cluster=ClusterConfig(hosts=str(hosts)), text=TextPoolConfig(num_envs=4)
    )
    learner = msgspec.structs.replace(config.learner, ranks=2)
    config = msgspec.structs.replace(config, learner=learner)
    shape = TinyConfig(
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        intermediate_size=64,
        vocab_size=300,
        context_size=128,
    )
    starts = [TaskStart(env=EnvSpec(id="digits_task:Digits"), task="digits", seed=3)]
    training = TrainingRun(config, starts, tiny(shape, ["go on"], seed=0))
    assert way(training) == f"{THROUGH}those of conversations are compared here"
