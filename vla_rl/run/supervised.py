"""Supervised updates that save the weights at intervals, at the end, and if they end early.

<out>-000500, <out>-001000    at regular intervals; a full disk is a warning
<out>                         at the end; a full disk is an error
<out>-000731                  after the last update, if Ctrl-C, SIGTERM, a closed terminal or
                              unreadable data ended it
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from rich.progress import track

from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.run.terminal import StopSignal, lasting_output
from vla_rl.types import derive_seed
from vla_rl.util.ownership import name_lock_file, sole_owner

if TYPE_CHECKING:  # they import torch: `--help` and errors in options must not wait for it
    from vla_rl.engines import DeviceLane, LanguageModel, PolicyModel
    from vla_rl.learner import Demonstration, ImitationConfig
    from vla_rl.learner.imitation import PolicyImitator
    from vla_rl.learner.imitation_backend import Preparation
    from vla_rl.models.robot_policy import RobotPolicy
    from vla_rl.types import Observation


logger = logging.getLogger(__name__)

BatchT = TypeVar("BatchT")


async def train_supervised(
    updates: int,
    batch: Callable[[int], Awaitable[BatchT]],
    learn: Callable[[int, BatchT], Awaitable[None]],
    save: Callable[[Path], Awaitable[None]],
    out: Path,
    *,
    save_every: int | None = None,
    description: str = "imitating",
) -> int:
    """Make all updates and save the weights; return the exit status.

    It is 0, or that of the signal that stopped them.

    Args:
        updates: number of updates.
        batch: reads the data of update `number`, counted from 1.
        learn: makes the update.
        save: writes the weights to a new folder.
        out: folder of the last weights.
        save_every: updates between saves on the way; None saves only at the end.
        description: text of the progress bar.

    Raises: ConfigError if `out` exists already, or another process is going to write it;
        CheckpointError if the last weights cannot be written; what `batch` raises, after the weights
        so far were saved; what `learn` raises.
    """
    with lasting_output(), _own_folder(out), StopSignal("saving the weights so far") as stop:
        done = 0
        for number in track(range(1, updates + 1), description=description):
            try:
                read = await batch(number)
            except Exception as error:
                await _save_before_raising(error, save, intermediate_folder(out, done), done)
                raise
            await learn(number, read)
            done = number
            if stop.is_asked:
                break
            if save_every is not None and done % save_every == 0 and done < updates:
                await _save_meanwhile(save, intermediate_folder(out, done))
        folder = out if done == updates else intermediate_folder(out, done)
        await save(folder)
        print(
            f"saved to {folder}"
            + ("" if done == updates else f", after {done} of {updates} updates"),
            flush=True,
        )
        return stop.exit_status


def intermediate_folder(out: Path, updates: int) -> Path:
    """Return the folder for weights after `updates` updates that are not the last."""
    return Path(f"{out}-{updates:06d}")


@contextlib.contextmanager
def _own_folder(out: Path) -> Iterator[None]:
    """Keep other processes from training into the same folder."""
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        owner = sole_owner(name_lock_file(out), f"the checkpoint {out}")
        with contextlib.ExitStack() as stack:
            stack.enter_context(owner)
            # written since the recipe looked
            if out.exists() and not (out.is_dir() and not any(out.iterdir())):
                raise ConfigError(f"{out} exists already, expected a new folder; choose another")
            released = stack.pop_all()
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be written ({error.filename}: {error.strerror}); choose another folder"
        ) from error
    with released:
        yield


async def _save_meanwhile(save: Callable[[Path], Awaitable[None]], folder: Path) -> None:
    try:
        await save(folder)
    except CheckpointError as error:
        logger.warning("%s Training continues", error)


async def _save_before_raising(
    error: Exception, save: Callable[[Path], Awaitable[None]], folder: Path, done: int
) -> None:
    """Save the weights if there was an update.

    A note of the error names the folder, or the reason why not.
    """
    if done == 0:
        return
    try:
        if not await asyncio.to_thread(folder.exists):
            await save(folder)
    except CheckpointError as failure:
        error.add_note(f"the weights after {done} updates could not be saved: {failure}")
    else:
        error.add_note(f"the weights after {done} updates were saved in {folder}")


@asynccontextmanager
async def opened_imitator(
    model: "PolicyModel[Any] | LanguageModel[Any]",
    lane: "DeviceLane",
    config: "ImitationConfig",
    *,
    prepare: "Callable[[Sequence[Observation]], Any] | None" = None,
    prepared_by: "Preparation | None" = None,
    seed: int = 0,
) -> "AsyncIterator[PolicyImitator]":
    """Make an imitator; with several ranks, start their processes, and end them on leaving.

    Args:
        model: the policy.
        lane: computes with it in this process.
        config: optimizer, micro-batches and ranks.
        prepare: makes training batches in this process. None: the model itself.
        prepared_by: makes those of ranks. None: the model itself.
        seed: seed of what ranks draw.

    Raises: ConfigError if the ranks cannot share this policy on this machine.
    """
    if config.ranks == 1:
        from vla_rl.learner import Imitator

        yield Imitator(model, lane, config, prepare=prepare)
        return
    # imported here, because one process pays nothing for what several need
    from vla_rl.actors import Runtime
    from vla_rl.learner.distributed import ShardedImitator

    async with Runtime("imitation") as runtime:
        sharded = ShardedImitator(model, runtime, lane, config, prepared_by=prepared_by, seed=seed)
        async with sharded as imitator:
            print(f"{config.ranks} ranks share the updates", flush=True)
            yield imitator


async def imitate_drawn(
    policy: "RobotPolicy",
    demonstrations: "Sequence[Demonstration]",
    config: "ImitationConfig",
    out: Path,
    *,
    updates: int,
    batch: int,
    seed: int,
    print_every: int,
    torch_threads: int = 1,
    save_every: int | None = None,
) -> int:
    """Fit a policy to demonstrations in memory, drawn with replacement; return the exit status.

    Args:
        policy: saved to `out` at the end.
        demonstrations: decisions to imitate.
        config: optimizer, micro-batches and ranks.
        out, updates, save_every: as in `train_supervised`.
        batch: decisions of an update.
        seed: of what is drawn.
        print_every: updates between two lines with the mean loss since the last.
        torch_threads: threads of the device lane.

    Raises: as `train_supervised` and `opened_imitator`.
    """
    # torch takes seconds to import: `--help` and errors in options must not wait for it
    from vla_rl.engines import DeviceLane

    order, losses = random.Random(derive_seed(seed, "samples")), list[float]()
    async with (
        DeviceLane(torch_threads) as lane,
        opened_imitator(policy, lane, config, seed=derive_seed(seed, "ranks")) as imitator,
    ):

        async def draw(_: int) -> "list[Demonstration]":
            return order.choices(demonstrations, k=batch)

        async def learn(number: int, chosen: "list[Demonstration]") -> None:
            losses.append((await imitator.train_step(chosen)).metrics["imitation/loss"])
            if number % print_every == 0:
                print(f"update {number}: loss {np.mean(losses[-print_every:]):.3f}", flush=True)

        async def save(folder: Path) -> None:
            await imitator.fetch_weights()
            await lane.run(policy.save, folder, work="checkpoint")

        return await train_supervised(updates, draw, learn, save, out, save_every=save_every)
