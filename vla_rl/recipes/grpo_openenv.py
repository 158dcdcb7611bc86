"""A language policy learns in an environment of OpenEnv, whose server runs elsewhere:

    python -m vla_rl.recipes.grpo_openenv --policy smollm2 --url http://127.0.0.1:8000

The environment is unchanged; its server has an interpreter of its own. The form of a reply follows from
the schema of actions that the server publishes: the reply itself, a JSON object, or calls of tools.
Every start is a seed of the environment.
"""

import sys
from functools import partial

from vla_rl.cli.command_line import Command, TrainingLaunch
from vla_rl.cli.launch import run_recipe
from vla_rl.envs.text import TextPoolConfig, make_text_task
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes.foreign_environments import ForeignTrainingConfig, launch_foreign, read_object
from vla_rl.rollout import TaskStart
from vla_rl.types import EnvSpec, PositiveInt

ENV_ID = "text/openenv"


class GrpoOpenEnvConfig(ForeignTrainingConfig, frozen=True, kw_only=True):
    """Reinforcement learning of a language policy in an environment of OpenEnv."""

    run: RunConfig = RunConfig(name="grpo_openenv", updates=20, checkpoint_every=10)
    text: TextPoolConfig = TextPoolConfig(num_envs=8)

    url: str = "http://127.0.0.1:8000"
    """Address of the environment's server."""

    reset: str = "{}"
    """Arguments of each reset besides its seed, as a JSON object, such as '{"dataset_name":
    "leg_counting", "size": 1}'."""

    instruction: str = ""
    """Text before the first observation, if the environment does not say what is to be done."""

    success_at: float = 1.0
    """Smallest sum of an episode's rewards that counts as success."""

    guided: bool = True
    """Restrict replies to JSON objects that fit the schema of actions, if actions have that form."""

    num_starts: PositiveInt = 1000
    """Seeds to train on. Those that are held out follow them."""

    @property
    def env(self) -> EnvSpec:
        """Specification of the environment."""
        return EnvSpec(
            id=ENV_ID,
            kwargs={
                "url": self.url,
                "reset": read_object(self.reset, "reset"),
                "instruction": self.instruction,
                "max_turns": self.chat.max_turns,
                "success_at": self.success_at,
                "is_guided": self.guided,
            },
        )


async def main(command: Command[TrainingLaunch, GrpoOpenEnvConfig]) -> int:
    """Plan, draw or train, as the command line says."""
    config = command.config
    # made once in this process, so that an address that is none is refused before the policy is read
    make_text_task(config.env)
    starts = [
        TaskStart(env=config.env, task="openenv", seed=seed)
        for seed in range(config.num_starts + config.num_validation)
    ]
    return await launch_foreign(command, starts[: config.num_starts], starts[config.num_starts :])


cli = partial(run_recipe, TrainingLaunch, GrpoOpenEnvConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
