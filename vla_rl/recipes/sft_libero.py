"""A base policy from demonstrations: `python -m vla_rl.recipes.sft_libero --demonstrations demos --out base`.

Reads what `record_demonstrations` wrote, trains a small OpenVLA-OFT by cross-entropy on the demonstrated action tokens, and
writes a checkpoint that `srpo_libero --policy` starts from. Every control step of a demonstration is one sample: what was
seen, and the chunk of actions from there on.
"""

import random
import sys
from pathlib import Path

import numpy as np
from rich.progress import track

from vla_rl.engines import DeviceLane, ImitationConfig, Imitator, OptimizerConfig
from vla_rl.engines.imitation import Demonstration
from vla_rl.errors import ConfigError
from vla_rl.models.openvla_oft import OpenVlaOft, tiny
from vla_rl.recipes.command_line import Command, Launch, run_recipe
from vla_rl.types import Config, derive_seed


class SftLiberoConfig(Config, frozen=True, kw_only=True):
    """Supervised learning of a base policy."""

    demonstrations: str = "demos"
    """Folder of demonstrations; all `.npz` files below it are used."""

    out: str = "base"
    """Folder of the checkpoint; must not exist yet."""

    max_episodes: int | None = None
    """Use only the first so many demonstrations of each folder."""

    updates: int = 3600
    """Optimizer steps."""

    batch: int = 8
    """Samples in one optimizer step; many small steps teach more than few large ones."""

    imitation: ImitationConfig = ImitationConfig(
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=50, decay_steps=3600), micro_batch=8
    )
    torch_threads: int = 1
    """Threads to compute with on a CPU."""

    seed: int = 0
    """Of the first weights and of the order of the samples."""

    def __post_init__(self) -> None:
        for field in ("updates", "batch", "torch_threads"):
            self.require(getattr(self, field) >= 1, field, "at least 1")


def read_demonstrations(config: SftLiberoConfig, chunk_size: int) -> list[Demonstration]:
    """One sample for each control step of each file. Raises: ConfigError where there is none, or a file is not one."""
    folders: dict[Path, list[Path]] = {}
    for path in sorted(Path(config.demonstrations).rglob("*.npz")):
        folders.setdefault(path.parent, []).append(path)
    samples = [
        sample
        for paths in folders.values()
        for path in paths[: config.max_episodes]
        for sample in _samples_of(path, chunk_size)
    ]
    if not samples:
        raise ConfigError(
            f"{config.demonstrations} holds no .npz file; record some: "
            f"python -m vla_rl.recipes.record_demonstrations --out {config.demonstrations}"
        )
    return samples


def _samples_of(path: Path, chunk_size: int) -> list[Demonstration]:
    try:
        with np.load(path, allow_pickle=False) as file:
            columns = {name: file[name] for name in file.files}
        images = {name: columns[name] for name in ("image", "wrist_image") if name in columns}
        actions, states, instruction = columns["action"], columns["state"], str(columns["instruction"])
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(f"{path} is not a demonstration: {error}; record it again") from error
    samples = []
    for step in range(len(actions)):
        chunk = np.zeros((chunk_size, actions.shape[1]), np.float32)
        rest = actions[step : step + chunk_size]
        chunk[: len(rest)] = rest
        observation = {name: frames[step] for name, frames in images.items()}
        observation |= {"state": states[step], "instruction": instruction}
        samples.append(Demonstration(observation=observation, actions=chunk, num_valid=len(rest)))
    return samples


def _new_folder(out: str) -> Path:
    if Path(out).exists():
        raise ConfigError(f"{out} exists already, expected a new folder for the checkpoint; choose another --out")
    return Path(out)


async def main(command: Command[Launch, SftLiberoConfig]) -> int:
    """Train and save."""
    config, out = command.config, _new_folder(command.config.out)
    model = OpenVlaOft.create(tiny(), seed=derive_seed(config.seed, "policy"))
    samples = read_demonstrations(config, model.config.chunk_size)
    print(f"{len(samples)} samples; {config.updates} updates of {config.batch}")
    if command.launch.dry_run:
        return 0
    order = random.Random(derive_seed(config.seed, "samples"))
    async with DeviceLane(config.torch_threads) as lane:
        imitator = Imitator(model, lane, config.imitation)
        losses: list[float] = []
        for number in track(range(1, config.updates + 1), description="imitating"):
            report = await imitator.update(order.choices(samples, k=config.batch))
            losses.append(report.metrics["imitation/loss"])
            if number % 500 == 0:
                print(f"update {number}: loss {sum(losses[-500:]) / 500:.3f}")
        seen = await imitator.evaluate(order.sample(samples, k=min(256, len(samples))))
    print(", ".join(f"{name} {value:.3f}" for name, value in seen.items()), "on what it was taught")
    model.save(out)
    print(f"saved to {out}")
    return 0


def cli() -> int:
    """The command line."""
    return run_recipe(Launch, SftLiberoConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
