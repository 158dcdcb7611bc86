"""DAgger on LIBERO: `python -m vla_rl.recipes.dagger_libero`.

A small head over a frozen policy learns what an expert does in the states that the policy reaches. The
expert acts at every other decision by a coin, or takes over if the policy is stuck (HG-DAgger:
`--intervention.takeover stall`). It is the scripted expert of the simulator, another policy's folder, or a
policy server.
"""

import contextlib
import sys
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Final

import numpy as np

from vla_rl.cli.command_line import Command, TrainingLaunch
from vla_rl.cli.launch import run_recipe
from vla_rl.envs import LIBERO_SUITES
from vla_rl.evaluation.run_episodes import within_range
from vla_rl.evaluation.scenes import resolve_checkpoint
from vla_rl.evaluation.suites import SuiteTask
from vla_rl.learner.off_policy.config import OffPolicyConfig
from vla_rl.models.steered import SteeringConfig
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes import srpo_libero
from vla_rl.recipes.off_policy_libero import OffPolicyLiberoConfig
from vla_rl.rollout.expert_agent import InterventionConfig, expert_agent, make_expert_agent
from vla_rl.rollout.experts import Expert, PolicyExpert
from vla_rl.serving.remote_config import RemotePolicyConfig, is_server_address
from vla_rl.types import Agent, Env, EnvSpec, Observation, Policy, PositiveInt, Trajectory

SCRIPTED: Final = "scripted"


class DaggerLiberoConfig(OffPolicyLiberoConfig, frozen=True, kw_only=True):
    """DAgger on LIBERO: the episodes of `OffPolicyLiberoConfig` with an expert, and these settings."""

    run: RunConfig = RunConfig(name="dagger_libero", updates=8, checkpoint_every=4)
    # every decision is labelled, so that none has to be an anchor
    off_policy: OffPolicyConfig = OffPolicyConfig(
        algorithm="dagger", first_rows=200, updates_per_decision=3.0, success_share=0.0
    )
    steering: SteeringConfig = SteeringConfig(
        scale=(2.0,), features="rows", proprio_size=8, std=0.05, reference_by_mean=True
    )
    """The head that is trained. A scale of 2 lets it choose any chunk, whatever the base would do."""

    expert: str = SCRIPTED
    """scripted: the simulator's own, which knows the hidden state. Else the folder of another policy, shipped,
    shipped_flow or shipped_goal as in `policy`, or the address of a policy server (ws://HOST:PORT)."""

    server: RemotePolicyConfig = RemotePolicyConfig()
    """How that server is asked."""

    expert_rows: PositiveInt | None = 8
    """Control steps that the scripted expert plans from each state that a decision begins in: those of a chunk. The
    simulator runs them and is put back. None: it follows the episode from its start, and its labels are wrong
    where the policy has acted."""

    # With half of the episodes the policy's own, labelled where they fail, the head solved 49 and 65 % of the starts
    # of which the base solves 83 % (docs/dagger.md).
    intervention: InterventionConfig = InterventionConfig(beta=0.3)
    """When the expert acts, and which decisions it labels."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.steering.require(
            not self.steering.steers,
            "kind",
            "residual: an expert's chunk does not tell what would steer to it",
        )
        if self.expert == SCRIPTED:
            for task in self.chosen_tasks:
                self.require(
                    task.suite in LIBERO_SUITES,
                    "tasks",
                    f"tasks of {', '.join(LIBERO_SUITES)}, which have scripted experts (or another expert)",
                )

    def unused_options(self) -> Mapping[str, str]:
        """Return also the options of other kinds of experts."""
        found = dict(super().unused_options())
        if self.replay.source is not None:
            why = "replay.from learns from stored episodes alone, and no expert acts"
            return {
                **found,
                **dict.fromkeys(("expert", "server", "expert_rows", "intervention"), why),
            }
        if self.expert != SCRIPTED:
            found["expert_rows"] = f"expert is {self.expert!r}, which plans on its own"
        if is_server_address(self.expert):
            return found
        if self.expert != SCRIPTED:  # a folder, which may be a head over a base of its own
            del found["policy_format.base_policy"]
        return {**found, "server": f"expert is {self.expert!r}, which is no policy server"}

    def make_training_env(self, task: SuiteTask) -> EnvSpec:
        """Return the environment of a task's training episodes, with suggestions of the scripted expert."""
        env = super().make_training_env(task)
        if self.expert != SCRIPTED:
            return env
        kwargs = {**env.kwargs, "expert_rows": self.expert_rows}
        return EnvSpec(id=f"vla_rl/{task.suite}-expert-v0", kwargs=kwargs)


async def run_with_scripted_expert(
    env: Env, policy: Policy, *, intervention: InterventionConfig
) -> Trajectory:
    """Run one episode with actions clipped to -1 and 1: an agent that another host imports by its name."""
    return await within_range(partial(expert_agent, intervention=intervention))(env, policy)


class ClippedExpert:
    """An expert whose actions are clipped to -1 and 1, beyond which a continuous head may go."""

    def __init__(self, expert: Expert) -> None:
        self._expert = expert

    async def act(self, observation: Observation) -> np.ndarray:
        """Return the expert's control steps, clipped."""
        return np.clip(await self._expert.act(observation), -1.0, 1.0)


@contextlib.asynccontextmanager
async def open_agent(config: DaggerLiberoConfig) -> AsyncIterator[Agent]:
    """Yield the agent of the training episodes, whose expert is open meanwhile.

    Raises: ConfigError if the expert does not suit the tasks, or its server cannot be reached;
        CheckpointError.
    """
    if config.expert == SCRIPTED:
        yield partial(run_with_scripted_expert, intervention=config.intervention)
    elif is_server_address(config.expert):
        from vla_rl.serving.remote_policy import RemotePolicyServer

        server = RemotePolicyServer(config.expert, config.server, config.benchmark.action_size)
        await server.read_metadata()
        yield within_range(make_expert_agent(PolicyExpert(server), config.intervention))
    else:
        from vla_rl.engines import DeviceLane, TorchActionEngine
        from vla_rl.evaluation.suites import require_fitting
        from vla_rl.models.loading import load_policy

        folder = resolve_checkpoint(config.expert, config.assets)
        policy = load_policy(folder, config.policy_format, config.run.device)
        require_fitting(policy, config.expert, config.benchmark, config.scene.image_size)
        async with DeviceLane(1) as lane, TorchActionEngine(policy, lane, config.engine) as engine:
            expert = ClippedExpert(PolicyExpert(engine))
            yield within_range(make_expert_agent(expert, config.intervention))


async def main(command: Command[TrainingLaunch, DaggerLiberoConfig]) -> int:
    """Plan, draw or train, as the command line says."""
    async with open_agent(command.config) as agent:
        return await srpo_libero.main(command, agent)


cli = partial(run_recipe, TrainingLaunch, DaggerLiberoConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
