"""An evaluation of a checkpoint in this process, apart from any run."""

from collections.abc import Sequence
from pathlib import Path

from vla_rl.actors import LastingForkServers, Runtime
from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine
from vla_rl.env_workers import SimulatorConfig, SimulatorPool
from vla_rl.evaluation.checkpoint_evaluator import load_policy
from vla_rl.evaluation.held_out_records import success_line
from vla_rl.evaluation.run_episodes import run_each, within_range
from vla_rl.rollout import embodied_agent
from vla_rl.types import EpisodeSpec, Trajectory


async def offline(
    policy: Path,
    episodes: Sequence[EpisodeSpec],
    version: int,
    fork_servers: LastingForkServers | None = None,
) -> list[bytes]:
    """The lines of an MLP policy's folder, with one simulator, and so decisions one at a time."""
    lines = []

    async def done(trajectory: Trajectory) -> None:
        lines.append(success_line(version, trajectory))

    model = load_policy("vla_rl.models.mlp:MlpPolicy", policy, "cpu")
    async with (
        Runtime("offline", fork_servers=fork_servers) as runtime,
        DeviceLane(1) as lane,
        SimulatorPool(runtime, SimulatorConfig(num_envs=1)) as pool,
        TorchActionEngine(model, lane, EngineConfig(), version) as engine,
    ):
        await run_each(pool, engine, within_range(embodied_agent), episodes, done)
    return lines
