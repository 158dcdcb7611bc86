"""Supervised fine-tuning of a robot's policy on the samples of a data set.

samples drawn at random ─► imitator ─► a line of the loss every 500 updates ─► folders on the way
after the last update: the error on training data ─► whatever the recipe does with the policy
"""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from vla_rl.datasets import DatasetOptions, RecordedEpisode, open_dataset
from vla_rl.errors import ConfigError, DataError
from vla_rl.run.supervised import intermediate_folder, opened_imitator, train_supervised
from vla_rl.types import derive_seed

if TYPE_CHECKING:  # they import torch: `--help` and errors in options must not wait for it
    from vla_rl.engines import DeviceLane, PolicyModel
    from vla_rl.learner import Demonstration, ImitationConfig
    from vla_rl.learner.imitation import PolicyImitator
    from vla_rl.learner.imitation_backend import Preparation
    from vla_rl.types import Observation

_log = logging.getLogger(__name__)

LOSS_LINES: Final = 500
"""Updates from one line of the loss to the next."""

COMPARED: Final = 256
"""Samples of the training data on which the last weights are compared with the demonstrations."""


class FineTuningOptions(Protocol):
    """Options that every recipe of supervised fine-tuning has."""

    @property
    def updates(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def save_every(self) -> int | None: ...
    @property
    def out(self) -> str: ...
    @property
    def imitation(self) -> "ImitationConfig": ...
    @property
    def seed(self) -> int: ...


class DataOptions(Protocol):
    """Options that name a data set."""

    @property
    def demonstrations(self) -> str: ...
    @property
    def data(self) -> DatasetOptions: ...


class SampleSource(Protocol):
    """Samples by number, such as `Samples`."""

    def __len__(self) -> int: ...
    def demonstrations(self, indices: Sequence[int]) -> "list[Demonstration]": ...


@dataclass(frozen=True)
class TrainingBatches:
    """How training batches differ from those for acting, such as by augmentation.

    Attributes:
        prepare: makes them in this process.
        prepared_by: the same as a name and plain values, which ranks in other processes can import.
    """

    prepare: "Callable[[Sequence[Observation]], Any]"
    prepared_by: "Preparation"


def read_demonstrations(options: DataOptions) -> list[RecordedEpisode]:
    """Open the data set; print a line if some of its episodes failed.

    Raises: ConfigError if it cannot be read.
    """
    try:
        episodes = open_dataset(Path(options.demonstrations), options.data)
    except DataError as error:
        raise ConfigError(str(error)) from error
    failed = [episode.name for episode in episodes if episode.is_success is False]
    if failed:
        # Recordings of a policy (`--run.record-to`) hold its failures too.
        _log.warning(
            "%d of the %d demonstrations did not solve their task, such as %s, and are imitated like the others; "
            "copy the successes into a data set of their own (LeRobotWriter), or learn from both kinds with "
            "recap_flow --collected.",
            len(failed),
            len(episodes),
            failed[0],
        )
    return episodes


def list_save_folders(options: FineTuningOptions) -> list[Path]:
    """Return the folder of each save."""
    every, out = options.save_every, Path(options.out)
    meanwhile = range(every, options.updates, every) if every else []
    return [*(intermediate_folder(out, number) for number in meanwhile), out]


async def fine_tune(
    policy: "PolicyModel[Any]",
    samples: SampleSource,
    options: FineTuningOptions,
    lane: "DeviceLane",
    save: Callable[[Path], None],
    batches: TrainingBatches | None = None,
) -> int:
    """Make all updates, save the weights, print the error on training data; return the exit status.

    Args:
        policy: trained in place.
        samples: samples to draw from.
        options: the recipe's options.
        lane: computes.
        save: writes the policy to a new folder.
        batches: how training batches differ; None: not at all.

    Raises: what `train_supervised` raises.
    """
    # two streams, so that switching the augmentation on does not change which samples are drawn
    order = random.Random(derive_seed(options.seed, "samples"))
    async with opened_imitator(
        policy,
        lane,
        options.imitation,
        prepare=batches.prepare if batches else None,
        prepared_by=batches.prepared_by if batches else None,
        seed=derive_seed(options.seed, "ranks"),
    ) as imitator:
        losses: list[float] = []

        async def batch(_: int) -> "list[Demonstration]":
            chosen = order.choices(range(len(samples)), k=options.batch)
            return await asyncio.to_thread(samples.demonstrations, chosen)

        async def learn(number: int, demonstrations: "list[Demonstration]") -> None:
            losses.append((await imitator.train_step(demonstrations)).metrics["imitation/loss"])
            if number % LOSS_LINES == 0:
                print(f"update {number}: loss {sum(losses[-LOSS_LINES:]) / LOSS_LINES:.3f}")

        async def save_current(folder: Path) -> None:
            # ranks have the newest weights, and a file is written from those of this process
            await imitator.fetch_weights()
            await lane.run(save, folder, work="checkpoint")

        status = await train_supervised(
            options.updates,
            batch,
            learn,
            save_current,
            Path(options.out),
            save_every=options.save_every,
        )
        if status == 0:
            await _print_error(imitator, samples, order)
    return status


async def _print_error(
    imitator: "PolicyImitator", samples: SampleSource, order: random.Random
) -> None:
    """Print how far the last weights are from the demonstrations."""
    # some and not all: a pass over every sample would take as long as an epoch of training
    chosen = order.sample(range(len(samples)), k=min(COMPARED, len(samples)))
    seen = await imitator.evaluate(await asyncio.to_thread(samples.demonstrations, chosen))
    print(", ".join(f"{name} {value:.3f}" for name, value in seen.items()), "on the training data")
