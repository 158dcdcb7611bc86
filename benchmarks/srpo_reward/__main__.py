"""Test whether SRPO's rewards rank failures by their progress: ours, the paper's rule and the
released code side by side.

    python -m benchmarks.srpo_reward                        the study on the recorded episodes
    python -m benchmarks.srpo_reward --vjepa2 <checkpoint>  with V-JEPA 2 as well
    python -m benchmarks.srpo_reward --data benchmarks/srpo_reward/data_of_development
                                                            the episodes that our rule was made on
    python -m benchmarks.srpo_reward --record               record the episodes again, in LIBERO
    python -m benchmarks.srpo_reward --data DIR --record --tasks 0 1 3 --policy-task 1 --seed 0
                                                            record other tasks, elsewhere

Keys of the last line, with the default encoder (`pixels`):
    spearman_ours, spearman_paper, spearman_released
                         rank correlation of reward and true progress among the failures of a task
    distinct_failures_ours, distinct_failures_paper, distinct_failures_released
                         share of the mixed groups in which failures get different rewards
    <encoder>/<rule>/..  the same for every encoder; `released` shares one video a prompt, like the
                         released code; `released_own_videos` is its rule with a video for each
                         trajectory
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.interleaved import print_json_line
from benchmarks.srpo_reward.episodes import DATA, Episode, load_episodes, save_episodes
from benchmarks.srpo_reward.study import Score, batch_of, figures_of, scores_of
from vla_rl.algorithms import EmbeddingConfig, VJepa2Config
from vla_rl.engines import DeviceLane
from vla_rl.models.openvla_oft import OpenVlaOft
from vla_rl.models.shipped import PLACEHOLDER_BASE_POLICY
from vla_rl.models.trajectory_encoders import trajectory_encoder


async def study(
    episodes: list[Episode], encoders: Mapping[str, EmbeddingConfig]
) -> dict[str, dict[str, Score]]:
    """Compute the scores by encoder and rule."""
    batch, policy = batch_of(episodes), OpenVlaOft.load(PLACEHOLDER_BASE_POLICY)
    async with DeviceLane(1) as lane:
        return {
            name: await scores_of(batch, trajectory_encoder(how, policy, lane))
            for name, how in encoders.items()
        }


def print_scores(episodes: list[Episode], scores: Mapping[str, Mapping[str, Score]]) -> None:
    """Print the scores as a table."""
    failures = sum(not episode.is_success for episode in episodes)
    table = Table("encoder", "rule", "Spearman", "within groups", "groups told apart")
    table.title = f"{len(episodes)} LIBERO episodes, {failures} of them failures"
    for encoder, by_rule in scores.items():
        for rule, of_rule in by_rule.items():
            numbers = (of_rule.spearman, of_rule.spearman_in_group, of_rule.distinct_failures)
            table.add_row(encoder, rule, *(f"{number:.2f}" for number in numbers))
    Console().print(table)


async def record_anew(
    folder: Path, scripted_tasks: Sequence[int], policy_task: int, seed: int
) -> None:
    """Run all episodes in LIBERO and write them to `folder`."""
    from benchmarks.srpo_reward.recording import Recording, record  # needs LIBERO

    began = time.perf_counter()
    episodes = await record(
        Recording(tuple(scripted_tasks), policy_task, seed),
        on_episode=lambda episode: print(_told(episode), file=sys.stderr, flush=True),
    )
    size = save_episodes(episodes, folder)
    print(f"{len(episodes)} episodes, {size / 1e6:.2f} MB, in {time.perf_counter() - began:.0f} s")


def _told(episode: Episode) -> str:
    outcome = "success" if episode.is_success else f"progress {episode.furthest:.2f}"
    return f"{episode.task}, start {episode.init_state_id}, {episode.kind}: {outcome}"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", action="store_true", help="record the episodes again first")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the recorded episodes")
    parser.add_argument("--vjepa2", help="folder or hub name of a V-JEPA 2 checkpoint")
    parser.add_argument(
        "--tasks", type=int, nargs="+", default=[2, 4, 9], help="tasks of the scripted experts"
    )
    parser.add_argument("--policy-task", type=int, default=6, help="task of the shipped policy")
    parser.add_argument("--seed", type=int, default=1, help="seed of noise, flaws and samples")
    arguments = parser.parse_args()
    encoders = {name: EmbeddingConfig(encoder=name) for name in ("pixels", "state", "policy")}
    if arguments.vjepa2:
        pooled = VJepa2Config(
            folder=arguments.vjepa2, precision="float32", short_videos="stretched"
        )
        in_time = msgspec.structs.replace(pooled, num_moments=16)
        encoders["vjepa2"] = EmbeddingConfig(encoder="vjepa2", vjepa2=pooled)
        encoders["vjepa2_16_moments"] = EmbeddingConfig(encoder="vjepa2", vjepa2=in_time)
    if arguments.record:
        asyncio.run(
            record_anew(arguments.data, arguments.tasks, arguments.policy_task, arguments.seed)
        )
    episodes = load_episodes(arguments.data)
    scores = asyncio.run(study(episodes, encoders))
    print_scores(episodes, scores)
    print_json_line(figures_of(scores))


if __name__ == "__main__":
    main()
