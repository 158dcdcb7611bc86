"""Options that users of other trainers look for, and that do not exist: refused by name."""

from collections.abc import Sequence
from typing import Final

from vla_rl.errors import ConfigError

SHARDS: Final = (
    "ranks share rows and, with --learner.shard weights, all weights and the optimizer's state; "
    "take more --learner.ranks"
)

ABSENT: Final = {
    "--learner.pipeline-parallel": f"the learner has no pipeline parallelism: {SHARDS}",
    "--learner.context-parallel": (
        "the learner has no context parallelism: a row is read whole by one rank; set "
        "--learner.micro-batch 1 and --recompute-activations if one does not fit"
    ),
}
"""Option and the reason, with what to do instead."""


def refuse_absent(arguments: Sequence[str]) -> None:
    """Raise ConfigError for an option that does not exist, with what to use instead."""
    for argument in arguments:
        name = argument.partition("=")[0].replace("_", "-")
        if name in ABSENT:
            raise ConfigError(f"{name} does not exist: {ABSENT[name]}")
