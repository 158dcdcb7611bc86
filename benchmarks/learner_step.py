"""Seconds of an update for each executed chunk, compared with the same update in the common way.

    python -m benchmarks.learner_step [--size tiny|7b] [--trajectories 8] [--mean-steps 200] [--rounds 3]

Episodes have a mean length of 200 control steps of 512. Ours computes the executed chunks; the peer
computes all 64 chunks of every episode, one batch of episodes after the other
(`benchmarks/plain_policy.py`). Both start from the same weights and leave gradients of the same
clipped surrogate; ours also steps the optimizer, scales the gradient and publishes.

Keys of the last line:
    update_speedup   the plain update's seconds a useful chunk over ours
    half_equal_share ours with advantages of 0 for every second pair of episodes, as in groups with
                     equal rewards, over ours; such episodes are not computed
    matrix_share     on CUDA: operations a second of ours over those of a large bfloat16 product in
                     this run; else null
and the seconds.
"""

import argparse
import time

import numpy as np
import torch
import uvloop

from benchmarks.interleaved import measure_in_turn, print_json_line, print_table
from benchmarks.plain_policy import PlainPolicy
from benchmarks.policy_sizes import Size, make_observation, make_policy
from vla_rl.engines import DeviceLane
from vla_rl.learner import Learner, LearnerConfig, OptimizerConfig
from vla_rl.models.openvla import OpenVla
from vla_rl.models.openvla_oft import OpenVlaOft
from vla_rl.types import ActionChunk, EnvSpec, EpisodeSpec, Sampling, Step, StopReason, Trajectory

MAX_STEPS = 512


def make_trajectories(policy: OpenVlaOft | OpenVla, num: int, mean_steps: int) -> list[Trajectory]:
    """Make episodes of noise with lengths spread around the mean, with the policy's own
    log-probs.
    """
    rng = np.random.default_rng(0)
    chunk_size = policy.config.chunk_size
    trajectories = []
    for index in range(num):
        share = (index + 0.5) / num  # lengths from half the mean to one and a half times it
        num_chunks = max(1, round(mean_steps * (0.5 + share) / chunk_size))
        steps = []
        for _ in range(num_chunks):
            seen = make_observation(policy.config, int(rng.integers(1 << 30)))
            with torch.inference_mode():
                sampled = policy.sample(
                    policy.prepare([seen]), [Sampling(seed=int(rng.integers(1 << 30)))]
                )
                tokens, log_probs = sampled.tokens, sampled.log_probs
            chunk = ActionChunk(
                actions=policy.decode(tokens.cpu().numpy())[0],
                tokens=tokens[0].cpu().numpy(),
                log_probs=log_probs[0].float().cpu().numpy(),
                weight_version=0,
            )
            steps.append(
                Step(observation=seen, chunk=chunk, rewards=np.zeros(chunk_size, np.float32))
            )
        episode = EpisodeSpec(
            episode_id=index,
            group_id=0,
            member=index,
            env=EnvSpec(id="noise"),
            task="noise",
            seed=0,
            policy_seed=0,
        )
        trajectories.append(
            Trajectory(
                episode=episode,
                steps=tuple(steps),
                final_observation=steps[-1].observation,
                stop_reason=StopReason.TIME_LIMIT,
            )
        )
    return trajectories


async def ours(
    policy: OpenVlaOft, trajectories: list[Trajectory], advantages: list[float], micro_batch: int
) -> float:
    """Measure the seconds of one update after a first one, which fills caches."""
    # a learning rate near 0, so that every update has the weights that the log-probs came from
    config = LearnerConfig(
        micro_batch=micro_batch, optimizer=OptimizerConfig(lr=1e-12, warmup_steps=0)
    )
    async with DeviceLane(num_threads=torch.get_num_threads()) as lane:
        learner = Learner(policy, lane, config)
        began = time.perf_counter()
        await learner.update(trajectories, advantages)
        return time.perf_counter() - began


def plain(
    policy: PlainPolicy,
    network: torch.nn.Module,
    trajectories: list[Trajectory],
    advantages: list[float],
) -> float:
    """Measure the seconds of the gradients of one update."""
    began = time.perf_counter()
    network.zero_grad()
    policy.update(
        trajectories,
        advantages,
        num_chunks=MAX_STEPS // len(trajectories[0].steps[0].chunk.actions),
    )
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def matrix_peak(device: torch.device) -> float:
    """Measure the floating-point operations a second of a large bfloat16 product."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        a @ b
    torch.cuda.synchronize()
    return 20 * 2 * 8192**3 / (time.perf_counter() - began)


def operations(policy: OpenVlaOft, num_chunks: int) -> float:
    """Count the floating-point operations of an update: three forward passes with two for each
    weight and token.
    """
    config = policy.config
    patches = (config.image_size // 14) ** 2 * len(config.cameras)
    towers = sum(parameter.numel() for parameter in policy.network.vision_backbone.parameters())
    trunk = sum(
        parameter.numel() for parameter in policy.network.language_model.model.layers.parameters()
    )
    tokens = patches + config.num_action_tokens + 20
    return 6.0 * float(num_chunks * (towers * patches + trunk * tokens))


def main() -> None:
    """Measure, print a table and the JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=("tiny", "7b"), default="tiny")
    parser.add_argument("--trajectories", type=int, default=8)
    parser.add_argument("--mean-steps", type=int, default=200)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    size: Size = options.size
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy = make_policy(size, device)
    other = PlainPolicy(policy.config, policy.network, policy.tokenizer)
    trajectories = make_trajectories(policy, options.trajectories, options.mean_steps)
    advantages = [1.0 if index % 2 else -1.0 for index in range(len(trajectories))]
    # the others are of groups with equal rewards
    half = [value if index % 4 < 2 else 0.0 for index, value in enumerate(advantages)]
    num_useful = sum(len(trajectory.steps) for trajectory in trajectories)
    seconds = measure_in_turn(
        {
            "ours_s": lambda: uvloop.run(
                ours(policy, trajectories, advantages, options.micro_batch)
            ),
            "half_equal_s": lambda: uvloop.run(
                ours(policy, trajectories, half, options.micro_batch)
            ),
            "plain_s": lambda: plain(other, policy.network, trajectories, advantages),
        },
        options.rounds,
    )
    share = None
    if device.type == "cuda":
        share = operations(policy, num_useful) / seconds["ours_s"] / matrix_peak(device)
    figures = {
        "update_speedup": seconds["plain_s"] / seconds["ours_s"],
        "half_equal_share": seconds["half_equal_s"] / seconds["ours_s"],
        "matrix_share": share,
        "useful_chunks": num_useful,
        "ours_s_per_chunk": seconds["ours_s"] / num_useful,
        "plain_s_per_chunk": seconds["plain_s"] / num_useful,
    }
    print_table(f"an update of {len(trajectories)} episodes, {size} on {device}", figures)
    print_json_line(figures)


if __name__ == "__main__":
    main()
