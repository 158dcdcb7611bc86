"""A language policy learns in an environment of the verifiers library, in a process of its own:

    python -m vla_rl.recipes.grpo_verifiers --policy smollm2 --env glossary --python /venvs/verifiers/bin/python

The environment is unchanged. It is loaded once before anything starts, to count its rows; what it lacks
is an error then.
"""

import random
import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from vla_rl.actors import Runtime
from vla_rl.cli.command_line import Command, TrainingLaunch
from vla_rl.cli.launch import run_recipe
from vla_rl.envs.text import TextPoolConfig
from vla_rl.errors import DataError
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes.foreign_environments import ForeignTrainingConfig, launch_foreign, read_object
from vla_rl.types import PositiveInt, derive_seed

if TYPE_CHECKING:
    from vla_rl.endpoint.verifiers import VerifiersConfig, VerifiersPool

LOCAL = '{"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}'


class GrpoVerifiersConfig(ForeignTrainingConfig, frozen=True, kw_only=True):
    """Reinforcement learning of a language policy in an environment of the verifiers library."""

    run: RunConfig = RunConfig(name="grpo_verifiers", updates=20, checkpoint_every=10)

    env: str = ""
    """Name of the environment: a module with a `load_environment`, or a v1 taskset."""

    arguments: str = LOCAL
    """Arguments of the environment, as a JSON object. The default runs the agent of a v1 environment
    in a process of this machine, without tools of its own; verifiers' default is a remote sandbox."""

    python: str | None = None
    """Python interpreter that has verifiers and the environment. None: this one."""

    max_rows: PositiveInt | None = None
    """Use only this many rows, the first ones. None: all. Required for a taskset without end."""

    success_at: float = 1.0
    """Smallest reward that counts as success."""

    cut_off_at_errors: bool = False
    """Whether an episode in which the environment raises after a reply ends there, without a reward,
    with one warning a cause. For environments that raise if a reply has the wrong form. Off: such an
    error ends the run, as a mistake of the environment would."""

    text: TextPoolConfig = TextPoolConfig(num_envs=32)

    def unused_options(self) -> Mapping[str, str]:
        """Return the options of text environments of this process."""
        reason = "the environments run in verifiers' process"
        return {**super().unused_options(), "text.sandbox": reason}

    @property
    def verifiers(self) -> "VerifiersConfig":
        """Configuration of the environment and its process."""
        # its package needs the extra `text`, which `--help` does without
        from vla_rl.endpoint.verifiers import VerifiersConfig

        return VerifiersConfig(
            env=self.env,
            arguments=read_object(self.arguments, "arguments"),
            max_rows=self.max_rows,
            python=self.python,
            num_envs=self.text.num_envs,
            success_at=self.success_at,
            cut_off_at_errors=self.cut_off_at_errors,
        )

    def make_own_pool(self, runtime: Runtime) -> "VerifiersPool":
        """Return the pool of the environment's rollouts."""
        from vla_rl.endpoint.verifiers import VerifiersPool

        return VerifiersPool(runtime, self.verifiers)


async def main(command: Command[TrainingLaunch, GrpoVerifiersConfig]) -> int:
    """Count the rows; plan, draw or train, as the command line says."""
    from vla_rl.endpoint.verifiers import VerifiersPool

    config = command.config
    config.require(bool(config.env), "env", "the name of an environment of verifiers")
    async with (
        Runtime("rows of a verifiers environment") as runtime,
        VerifiersPool(runtime, config.verifiers) as pool,
    ):
        starts = pool.starts()
    if len(starts) <= config.num_validation:
        raise DataError(
            f"{config.env} has {len(starts)} rows and num_validation={config.num_validation} of them "
            "are held out, which leaves none to train on; hold out fewer"
        )
    # shuffled, because data sets are often sorted by difficulty or source
    random.Random(derive_seed(config.run.seed, "held-out rows")).shuffle(starts)
    held_out, trained = starts[: config.num_validation], starts[config.num_validation :]
    print(f"{config.env}: {len(trained)} rows to train on, {len(held_out)} held out", flush=True)
    return await launch_foreign(command, trained, held_out)


cli = partial(run_recipe, TrainingLaunch, GrpoVerifiersConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
