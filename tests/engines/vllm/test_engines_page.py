"""docs/engines.md does what it says; with `--engine vllm` recipes, hosts that run episodes have engine processes."""

import ast
import asyncio
import importlib.util
import json
import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from _pytest.capture import CaptureFixture
from host_cluster import loopback_hosts
from small_policies import completing_policy, moved
from toy_runs import small_run

from vla_rl.actors import InLoop, Runtime
from vla_rl.algorithms import EmbeddingConfig
from vla_rl.cli.command_line import TrainingLaunch, parse_command
from vla_rl.cluster.config import ClusterConfig
from vla_rl.engines import DeviceLane, EngineConfig
from vla_rl.engines.config import UpdateMode
from vla_rl.engines.vllm import VllmConfig, VllmEngine
from vla_rl.engines.vllm.adapter import SUPPORTED_VERSIONS
from vla_rl.env_workers import SimulatorConfig
from vla_rl.envs.text import TextPoolConfig
from vla_rl.learner import LearnerConfig, OptimizerConfig
from vla_rl.learner.distributed.messages import read_observations
from vla_rl.models.trajectory_encoders import trajectory_encoder
from vla_rl.pipelines.config import RunConfig, TextTrainingConfig
from vla_rl.recipes.srpo_toy import SrpoToyConfig, new_policy, training_starts
from vla_rl.remote_rollout.episode_store import observed_bytes
from vla_rl.remote_rollout.host_control import RolloutHostRunner
from vla_rl.remote_rollout.host_recipe import make_host_recipe, read_pieces, save_encoder
from vla_rl.remote_rollout.image_routes import ImageRoutes
from vla_rl.remote_rollout.rollout_host import RolloutHost
from vla_rl.reporting import read_metrics
from vla_rl.rollout import ChatLimits, GroupSource, SchedulerConfig, TaskStart, embodied_agent
from vla_rl.run.train import train
from vla_rl.team.members import Team
from vla_rl.types import SOLE_MEMBER, EnvSpec, Trajectory

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "engines.md").read_text()


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning")
@pytest.mark.needs_vllm
@pytest.mark.proof  # test_contracts.py starts the same engine for the same decision
def test_the_page_runs_and_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(snippet, "engines.md", "exec"), names)
    asyncio.run(names["main"]())
    assert "(8, 7) 0 0\n" in capsys.readouterr().out


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning")
@pytest.mark.needs_vllm
def test_the_page_knows_every_update_mode() -> None:
    assert set(
        re.findall(r"^\| `(\w+)` \| ", PAGE.split("`update_mode` selects")[1], re.MULTILINE)
    ) == set(get_args(UpdateMode))


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning")
@pytest.mark.needs_vllm
def test_what_the_page_names_exists() -> None:
    for name in re.findall(r"`engine\.(\w+)", PAGE):
        assert hasattr(VllmEngine, name), name
    for name in (
        "attempts",
        "max_restarts",
        "health_every_s",
        "health_timeout_s",
        "startup_s",
        "can_sleep",
    ):
        assert f"`{name}`" in PAGE
        assert hasattr(VllmConfig(), name)


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning")
@pytest.mark.needs_vllm
def test_the_requirements_have_all_that_vllm_imports_for_a_request_with_an_image() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (root,) = map(Path, spec.submodule_search_locations)
    files = [
        root / "multimodal" / name
        for name in ("hasher.py", "inputs.py", "parse.py", "media/image.py")
    ]
    files += [*(root / "multimodal" / "processing").glob("*.py"), root / "renderers" / "hf.py"]
    pinned = set(
        re.findall(
            r"^([\w-]+)==", (ROOT / "requirements" / "vllm-cpu.txt").read_text(), re.MULTILINE
        )
    )
    missing = {
        name
        for path in files
        for name in packages_imported_by(path)
        if importlib.util.find_spec(name) is None
    }
    assert missing <= pinned


def packages_imported_by(path: Path) -> set[str]:
    """Other packages, also those that are imported inside of functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names |= {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
        names |= (
            {node.module or ""} if isinstance(node, ast.ImportFrom) and node.level == 0 else set()
        )
    return {name.split(".")[0] for name in names}


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning")
@pytest.mark.needs_vllm
def test_the_requirements_are_those_of_a_supported_version() -> None:
    pinned = re.search(
        r"^vllm-cpu==(.*)$", (ROOT / "requirements" / "vllm-cpu.txt").read_text(), re.MULTILINE
    )
    assert pinned is not None
    assert pinned[1] in SUPPORTED_VERSIONS
    assert f"vllm=={SUPPORTED_VERSIONS[-1]}" in (ROOT / "pyproject.toml").read_text()
    assert f"vllm=={SUPPORTED_VERSIONS[-1]}" in PAGE


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning")
@pytest.mark.parametrize(
    "arguments", [["--engine", "vllm"], ["--engine=vllm"], ["--engine.kind", "vllm"]]
)
def test_the_engine_is_chosen_by_one_word(arguments: list[str]) -> None:
    command = parse_command(
        TrainingLaunch, SrpoToyConfig, "", [*arguments, "--engine.vllm.num-engines", "2"]
    )
    assert command.config.engine == EngineConfig(kind="vllm", vllm=VllmConfig(num_engines=2))


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning")
def test_an_unknown_engine_is_refused_with_those_there_are(capsys: CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_command(TrainingLaunch, SrpoToyConfig, "", ["--engine", "vlm"])
    assert "torch" in capsys.readouterr().err


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning")
@pytest.mark.needs_vllm
async def test_a_recipe_trains_with_engine_processes(tmp_path: Path) -> None:
    arguments = [
        "--engine",
        "vllm",
        "--run.updates",
        "3",
        "--run.root",
        str(tmp_path),
        "--simulators.num-envs",
        "2",
    ]
    arguments += ["--group-size", "4", "--scheduler.groups-per-update", "1"]
    config = parse_command(TrainingLaunch, SrpoToyConfig, "", arguments).config
    outcome = await train(config, training_starts(config), new_policy(config))
    assert not outcome.was_stopped
    rows = [
        json.loads(line) for line in (outcome.run.path / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 3
    # the engine's log-probs are the learner's, as far as the same weights chose the tokens
    gaps = [row["update/log_prob_gap_max"] for row in rows if "update/log_prob_gap_max" in row]
    assert gaps
    assert max(gaps) < 1e-4
    assert all(0.0 < row["engine/update_pause_s"] < row["engine/update_total_s"] for row in rows)
    assert rows[-1]["engine/num_ready"] == 1.0


STARTS = [
    TaskStart(env=EnvSpec(id="rewarded_texts:Digits"), task="digits", seed=seed)
    for seed in range(4)
]


@pytest.mark.proof
@pytest.mark.needs_vllm
@pytest.mark.timeout(1200)
async def test_a_host_starts_engine_processes_and_gives_them_every_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "support"))
    async with asyncio.timeout(1100), loopback_hosts(tmp_path) as listed:
        config = TextTrainingConfig(
            run=RunConfig(name="far", root=str(tmp_path / "runs"), updates=3, device="cpu"),
            group_size=4,
            scheduler=SchedulerConfig(groups_per_update=2, max_staleness=1),
            text=TextPoolConfig(num_envs=4),
            chat=ChatLimits(max_turns=3, max_reply=6),
            engine=EngineConfig(kind="vllm", max_reply=6),
            learner=LearnerConfig(optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0)),
            cluster=ClusterConfig(hosts=str(listed)),
        )
        outcome = await train(config, STARTS, completing_policy())
    lines = read_metrics(outcome.run.metrics)
    assert [line["update"] for line in lines] == [1, 2, 3]
    assert lines[-1]["hosts/far1/episodes"] >= 3 * 2 * 4
    # no engine acts here, and what the far ones report is what the learner computes
    assert "engine/num_ready" not in lines[-1]
    gaps = [line["update/log_prob_gap_max"] for line in lines if "update/log_prob_gap_max" in line]
    assert gaps
    assert max(gaps) < 1e-4


EMBEDDING = EmbeddingConfig(encoder="policy", num_frames=3)


def robot_run(root: Path, **changes: object) -> SrpoToyConfig:
    """A small run of SRPO whose episodes ask engine processes, and are compared by the policy's tower."""
    config = small_run(root)
    run = msgspec.structs.replace(config.run, device="cpu")
    engine = EngineConfig(kind="vllm")
    return msgspec.structs.replace(config, run=run, engine=engine, embedding=EMBEDDING, **changes)


def with_images(trajectory: Trajectory) -> Trajectory:
    """The same episode with the images that are in an image cache, and without an embedding."""
    seen = [*(step.observation for step in trajectory.steps), trajectory.final_observation]
    *before, final = read_observations(seen)
    steps = tuple(
        msgspec.structs.replace(step, observation=observation)
        for step, observation in zip(trajectory.steps, before, strict=True)
    )
    return msgspec.structs.replace(trajectory, steps=steps, final_observation=final, embedding=None)


# in the suite, the recipe above starts the same engine by the same function, test_rollout_host.py
# embeds what a host hands over, and test_image_needs.py has both in one run's settings
@pytest.mark.proof
@pytest.mark.needs_vllm
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning")
async def test_a_host_embeds_what_it_hands_over_beside_its_engine_process(tmp_path: Path) -> None:
    config = robot_run(tmp_path, simulators=SimulatorConfig(num_envs=1))
    model, starts = new_policy(config), training_starts(config)
    episode = GroupSource(starts, 1, seed=0).next_group().episodes[0]
    recipe = make_host_recipe(config, starts, Team.of(model), embodied_agent)
    files = tmp_path / "policies"
    model.save(files / SOLE_MEMBER)
    async with asyncio.timeout(500), AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(Runtime())
        lane = await stack.enter_async_context(DeviceLane(1))
        # the run began with another tower than the policy's files have
        encoder = trajectory_encoder(EMBEDDING, moved(model, 3), lane)
        await lane.run(save_encoder, encoder, files)
        host = await runtime.spawn(RolloutHost, "far", 1 << 24, placement=InLoop())
        for piece in read_pieces(files):
            await host.put_file(*piece)
        status = await host.open(msgspec.structs.replace(recipe, embedding=EMBEDDING))
        routes = await stack.enter_async_context(ImageRoutes(1 << 24))
        remote = RolloutHostRunner(host, status, route=await routes.connect_host("far", host))
        found = await remote.materialise(await remote.run_episode(episode))
        assert found.cached_images is not None
        assert observed_bytes(found) == 0
        assert found.embedding is not None
        (local,) = await encoder.embed([with_images(found)])
    assert np.array_equal(found.embedding, local)


@pytest.mark.proof
@pytest.mark.needs_vllm
@pytest.mark.timeout(1200)
async def test_images_of_engine_processes_go_to_the_ranks_past_the_control_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with asyncio.timeout(1100), loopback_hosts(tmp_path) as listed:
        config = robot_run(tmp_path / "runs", cluster=ClusterConfig(hosts=str(listed)))
        learner = msgspec.structs.replace(config.learner, ranks=2)
        config = msgspec.structs.replace(config, learner=learner)
        outcome = await train(config, training_starts(config), new_policy(config))
    assert "images go from the hosts to the learner ranks directly" in capsys.readouterr().out
    lines = read_metrics(outcome.run.metrics)
    assert [line["update"] for line in lines] == [1, 2]
    assert lines[-1]["hosts/image_bytes_local"] == 0 < lines[-1]["hosts/image_bytes_cached"]
    assert max(line["update/log_prob_gap_max"] for line in lines) < 1e-4
