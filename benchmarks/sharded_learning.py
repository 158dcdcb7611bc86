"""A learner over several ranks on this machine's CPU: how exact it is, and what it costs.

    python -m benchmarks.sharded_learning                       all of it
    python -m benchmarks.sharded_learning --only cost death     some parts of it

A relative difference is the largest |difference| of a parameter over its largest |gradient|;
parameters whose largest |gradient| is below 1e-4 of the global norm are compared with that norm.

Keys of the last line:
    grad_rel_diff_2, grad_rel_diff_4   first gradient of 2 and 4 ranks against one process, worst of
                                       OpenVLA-OFT, OpenVLA and a language model, all tiny
    grad_rel_diff_tp2, grad_rel_diff_dp2_tp2   the same of 2 ranks that share every layer, and of 2
                                       such pairs, worst of these and of Qwen3
    update_rel_diff_3       Adam's mean gradient after three updates on 2 ranks, worst of ppo, gspo
                            and clip_cov
    resume_rel_diff         gradients of the next two updates: saved on 2 ranks, resumed on 1, 3 and 4
    resume_rel_diff_moments   Adam's mean gradient after these updates, as it goes into the weights; 1
                            and 2 ranks differ as much without a resume
    resume_rel_diff_same    the larger of both, resumed on 2: what saving and reading alone change
    rows_imbalance          largest over mean load of 64 ranks, 512 episodes of 1 to 64 decisions
    cpu_overhead_2          CPU seconds of an update on 2 ranks over one process, 64 rows through
                            about 43 million parameters, after a first one
    publish_peak_extra_mb   most private memory of a rank, or of the learner's process, while the
                            weights go from the ranks to the engine, beyond that before
    death_to_error_s        seconds from kill -9 of a rank in an update to the learner's error
"""

import argparse
import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
import uvloop
from torch import Tensor

from benchmarks.conversations import SHAPE, broken, chat, episode, qwen3, turn
from benchmarks.interleaved import print_json_line
from benchmarks.learner_step import make_trajectories
from benchmarks.shared_updates import gradients, relative_difference, saved, settings
from vla_rl.actors import Runtime
from vla_rl.algorithms import PolicyLossConfig
from vla_rl.engines import DeviceLane
from vla_rl.learner import Learner, LearnerConfig, OptimizerConfig, PolicyLearner
from vla_rl.learner.distributed import RankFailed, ShardedLearner
from vla_rl.learner.plan import rows_imbalance
from vla_rl.models.language import tiny as tiny_language
from vla_rl.models.openvla import OpenVla
from vla_rl.models.openvla_oft import OpenVlaOft, tiny
from vla_rl.models.prismatic.config import OpenVlaConfig
from vla_rl.types import Trajectory

ADVANTAGES: Final = (1.0, -0.5, 0.25)
PARTS: Final = ("gradients", "tensor", "updates", "resume", "cost", "publication", "death")
LOSSES: Final = ("ppo", "gspo", "clip_cov")


def small_oft() -> OpenVlaOft:
    """Make a tiny OpenVLA-OFT."""
    return OpenVlaOft.create(tiny(image_size=28, cameras=("image",), proprio=None), seed=0)


def small_openvla() -> OpenVla:
    """Make a tiny OpenVLA."""
    shape = small_oft().config
    names = {*OpenVlaConfig.__struct_fields__, "tokenizer_file"} & {*shape.__struct_fields__}
    return OpenVla.create(OpenVlaConfig(**{name: getattr(shape, name) for name in names}), seed=0)


def language() -> Any:
    """Make a tiny language policy."""
    return tiny_language(SHAPE, ["a"], seed=0)


FAMILIES: Final = (small_oft, small_openvla, language)


def wide_oft() -> OpenVlaOft:
    """Make an OpenVLA-OFT of about 43 million parameters."""
    shape = tiny(image_size=28, cameras=("image",), proprio=None)
    llm = msgspec.structs.replace(
        shape.llm, hidden_size=768, intermediate_size=2048, num_layers=5, num_heads=12
    )
    return OpenVlaOft.create(msgspec.structs.replace(shape, llm=llm), seed=0)


def episodes(policy: Any) -> list[Trajectory]:
    """Return three episodes of unequal lengths."""
    if isinstance(policy, OpenVlaOft | OpenVla):
        return make_trajectories(policy, 3, 24)
    return [chat(policy, 0), broken(policy, 1), episode(2, turn(policy, [9, 9], [25]))]


async def gradient_difference(
    make: Callable[[], Any],
    num_ranks: int,
    runtime: Runtime,
    lane: DeviceLane,
    folder: Path,
    tensor_parallel: int = 1,
) -> float:
    """Compare the first gradient of several ranks with one process's."""
    alone, shared = make(), make()
    trajectories = episodes(alone)
    one = Learner(alone, lane, settings())
    expected = await gradients(one, trajectories, ADVANTAGES, folder / "one")
    ranks = settings(ranks=num_ranks, tensor_parallel=tensor_parallel)
    async with ShardedLearner(shared, runtime, lane, ranks) as many:
        found = await gradients(many, trajectories, ADVANTAGES, folder / "many")
    return relative_difference(found, expected)


async def moments(learner: PolicyLearner, folder: Path) -> dict[str, Tensor]:
    """Return Adam's mean gradients."""
    state: Any = await saved(learner, folder)
    return {name: each for name, each in state.optimizer.items() if name.startswith("exp_avg/")}


async def update_difference(loss: str, runtime: Runtime, lane: DeviceLane, folder: Path) -> float:
    """Compare Adam's mean gradients after three updates on 2 ranks with one process's."""
    alone, shared = language(), language()
    trajectories, changes = episodes(alone), {"loss": PolicyLossConfig(name=loss)}
    one = Learner(alone, lane, settings(**changes))
    async with ShardedLearner(shared, runtime, lane, settings(ranks=2, **changes)) as two:
        for _ in range(3):
            for learner in (one, two):
                await learner.update(trajectories, list(ADVANTAGES))
        found = await moments(two, folder / "two")
    return relative_difference(found, await moments(one, folder / "one"))


async def next_moments(learner: PolicyLearner, folder: Path) -> list[dict[str, Tensor]]:
    """Make two updates; return Adam's mean gradients after each."""
    found = []
    for number in range(2):
        await learner.update(episodes(language()), list(ADVANTAGES))
        found.append(await moments(learner, folder / str(number)))
    return found


async def resumed_differences(
    decay: float, runtime: Runtime, lane: DeviceLane, folder: Path
) -> dict[int, list[float]]:
    """Compare the two updates after resuming on 1 to 4 ranks with the uninterrupted ones on 2.

    Args:
        decay: Adam's decay of the mean gradient; with 0, the mean is the last gradient itself.

    Returns: the difference of the mean gradients after each update, by number of ranks.
    """
    optimizer = msgspec.structs.replace(settings().optimizer, betas=(decay, 0.999))

    async with ShardedLearner(
        language(), runtime, lane, settings(ranks=2, optimizer=optimizer)
    ) as two:
        await next_moments(two, folder / "first")
        state = await saved(two, folder / "saved")
        expected = await next_moments(two, folder / "expected")

    async def compared(learner: PolicyLearner, name: str) -> list[float]:
        await learner.restore(state)
        found = await next_moments(learner, folder / name)
        return [relative_difference(*pair) for pair in zip(found, expected, strict=True)]

    one = Learner(language(), lane, settings(optimizer=optimizer))
    differences = {1: await compared(one, "one")}
    for num_ranks in (2, 3, 4):
        config = settings(ranks=num_ranks, optimizer=optimizer)
        async with ShardedLearner(language(), runtime, lane, config) as many:
            differences[num_ranks] = await compared(many, f"many-{num_ranks}")
    return differences


async def resume_differences(runtime: Runtime, lane: DeviceLane, folder: Path) -> dict[str, float]:
    """Compare gradients, and Adam's mean gradients, after a resume with the uninterrupted ones."""
    gradients_apart = await resumed_differences(0.0, runtime, lane, folder / "gradients")
    means_apart = await resumed_differences(0.9, runtime, lane, folder / "means")
    same = max(*gradients_apart.pop(2), *means_apart.pop(2))
    return {
        "resume_rel_diff": max(map(max, gradients_apart.values())),
        "resume_rel_diff_moments": max(each[-1] for each in means_apart.values()),
        "resume_rel_diff_same": same,
    }


async def cost(runtime: Runtime, lane: DeviceLane) -> dict[str, float]:
    """Measure CPU seconds of an update."""
    alone, shared = wide_oft(), wide_oft()
    num_parameters = sum(each.numel() for each in alone.network.parameters())
    trajectories = make_trajectories(alone, 8, 8 * alone.config.chunk_size)
    advantages = [1.0 if number % 2 else -0.5 for number in range(len(trajectories))]
    num_rows = sum(len(each.steps) for each in trajectories)
    config = LearnerConfig(optimizer=OptimizerConfig(lr=1e-5, warmup_steps=0), micro_batch=4)
    one = Learner(alone, lane, config)
    await one.update(trajectories, advantages)
    started = time.process_time()
    await one.update(trajectories, advantages)
    single_s = time.process_time() - started
    async with ShardedLearner(
        shared, runtime, lane, msgspec.structs.replace(config, ranks=2)
    ) as two:
        await two.update(trajectories, advantages)
        pids = [os.getpid(), *(runtime.info(rank).pid for rank in two.ranks.ranks)]
        started = sum(cpu_seconds(pid) for pid in pids)
        await two.update(trajectories, advantages)
        shared_s = sum(cpu_seconds(pid) for pid in pids) - started
    print(
        f"{num_parameters:,} parameters, {num_rows} rows: {single_s:.2f} CPU s in one process, "
        f"{shared_s:.2f} on 2 ranks"
    )
    return {"cpu_overhead_2": shared_s / single_s}


async def publication_mb(runtime: Runtime, lane: DeviceLane) -> float:
    """Return how far the private memory of a rank, or of this process, rises in a publication.

    The larger of both.
    """
    policy = wide_oft()
    config = LearnerConfig(optimizer=OptimizerConfig(lr=1e-5, warmup_steps=0), ranks=2)
    async with ShardedLearner(policy, runtime, lane, config) as learner:
        pids = [os.getpid(), runtime.info(learner.ranks.ranks[0]).pid]
        before = [private_mb(pid) for pid in pids]
        most = list(before)
        async with asyncio.TaskGroup() as tasks:
            publication = tasks.create_task(learner.ranks.fetch_weights())
            while not publication.done():
                most = [max(pair) for pair in zip(most, map(private_mb, pids), strict=True)]
                await asyncio.sleep(0.001)
    return max(high - low for high, low in zip(most, before, strict=True))


async def seconds_to_error(runtime: Runtime, lane: DeviceLane) -> float:
    """Return the seconds from the kill -9 of a rank in an update to the error."""
    policy = wide_oft()
    trajectories = make_trajectories(policy, 4, 8 * policy.config.chunk_size)
    config = LearnerConfig(optimizer=OptimizerConfig(lr=1e-5, warmup_steps=0), micro_batch=1)
    async with ShardedLearner(
        policy, runtime, lane, msgspec.structs.replace(config, ranks=2)
    ) as two:
        await two.update(trajectories, [1.0, -1.0, 0.5, -0.5])
        killed, took_s = 0.0, None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(two.update(trajectories, [1.0, -1.0, 0.5, -0.5]))
                await asyncio.sleep(0.5)  # in the middle of its passes
                killed = time.monotonic()
                os.kill(runtime.info(two.ranks.ranks[1]).pid, signal.SIGKILL)
        except* RankFailed as errors:
            print(*errors.exceptions)
            took_s = time.monotonic() - killed
        if took_s is not None:
            return took_s
    raise AssertionError("the update ended before the rank was killed")


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def private_mb(pid: int) -> float:
    """Return the private memory of a process in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon:"))


def imbalance() -> float:
    """Return the largest over the mean load of 64 ranks."""
    rng = np.random.default_rng(0)
    decisions = rng.integers(1, 65, 512)
    return rows_imbalance(torch.from_numpy(np.repeat(rng.integers(300, 700, 512), decisions)), 64)


async def worst(differences: Sequence[Any]) -> float:
    """Await differences one after another; return the largest."""
    found: list[float] = [await each for each in differences]
    return max(found)


async def gradient_differences(
    runtime: Runtime, lane: DeviceLane, folder: Path
) -> dict[str, float]:
    """Compare the gradients of each family on 2 and 4 ranks with one process's."""
    figures = {}
    for num_ranks in (2, 4):
        figures[f"grad_rel_diff_{num_ranks}"] = await worst(
            [
                gradient_difference(
                    make, num_ranks, runtime, lane, folder / f"{make.__name__}-{num_ranks}"
                )
                for make in FAMILIES
            ]
        )
    return figures


async def cut_gradient_differences(
    runtime: Runtime, lane: DeviceLane, folder: Path
) -> dict[str, float]:
    """Compare the gradients of ranks that share every layer in pairs with one process's."""
    figures = {}
    for name, num_ranks in (("tp2", 2), ("dp2_tp2", 4)):
        figures[f"grad_rel_diff_{name}"] = await worst(
            [
                gradient_difference(
                    make, num_ranks, runtime, lane, folder / f"{make.__name__}-{name}", 2
                )
                for make in (*FAMILIES, qwen3)
            ]
        )
    return figures


async def measured(part: str, runtime: Runtime, lane: DeviceLane, folder: Path) -> dict[str, float]:
    """Measure one part."""
    if part == "gradients":
        return await gradient_differences(runtime, lane, folder)
    if part == "tensor":
        return await cut_gradient_differences(runtime, lane, folder)
    if part == "updates":
        differences = [update_difference(loss, runtime, lane, folder / loss) for loss in LOSSES]
        return {"update_rel_diff_3": await worst(differences)}
    if part == "resume":
        return await resume_differences(runtime, lane, folder / "resume")
    if part == "cost":
        return await cost(runtime, lane)
    if part == "publication":
        return {"publish_peak_extra_mb": await publication_mb(runtime, lane)}
    return {"death_to_error_s": await seconds_to_error(runtime, lane)}


async def main(parts: Sequence[str]) -> None:
    """Measure some parts, and print them."""
    figures: dict[str, object] = {"rows_imbalance": imbalance()}
    with tempfile.TemporaryDirectory() as name:
        async with DeviceLane(1) as lane, Runtime("sharded learning") as runtime:
            for part in parts:
                found = await measured(part, runtime, lane, Path(name))
                print(found, flush=True)
                figures |= found
    print_json_line(figures)


def cli() -> None:
    """Read the command line, and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure")
    uvloop.run(main(parser.parse_args().only))


if __name__ == "__main__":
    cli()
