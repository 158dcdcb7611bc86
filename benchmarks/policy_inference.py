"""Decisions a second of the torch engine, compared with the same network in the common way.

    python -m benchmarks.policy_inference [--size tiny|7b] [--envs 64] [--rounds 3] [--seconds 4]

Every episode asks again as soon as it has its answer, as if simulators took no time. The peer
answers all of them in one batch, one call after the other: `benchmarks/plain_policy.py`. Frames are
224 x 224, uint8, one a camera.

Keys of the last line:
    decisions_speedup   decisions a second of ours over the plain one's
    graphs_speedup      on a GPU: ours with CUDA graphs over ours without
and the rates.
"""

import argparse
import asyncio
import time

import torch
import uvloop

from benchmarks.interleaved import measure_in_turn, print_json_line, print_table
from benchmarks.plain_policy import PlainPolicy
from benchmarks.policy_sizes import make_observation, make_policy
from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine
from vla_rl.models.openvla_oft import OpenVlaOft
from vla_rl.types import Observation, Sampling


async def ours(
    policy: OpenVlaOft, observations: list[Observation], seconds: float, *, cuda_graphs: bool = True
) -> float:
    """Measure decisions a second, with one coroutine an episode."""
    made = 0
    until = time.perf_counter() + seconds

    async def episode(index: int) -> None:
        nonlocal made
        while time.perf_counter() < until:
            await engine.act(observations[index], Sampling(temperature=1.6, seed=made))
            made += 1

    config = EngineConfig(max_batch=len(observations), cuda_graphs=cuda_graphs)
    async with (
        DeviceLane(num_threads=torch.get_num_threads()) as lane,
        TorchActionEngine(policy, lane, config) as engine,
    ):
        began = time.perf_counter()
        async with asyncio.TaskGroup() as episodes:
            for index in range(len(observations)):
                episodes.create_task(episode(index))
        return made / (time.perf_counter() - began)


def plain(policy: PlainPolicy, observations: list[Observation], seconds: float) -> float:
    """Measure decisions a second, with the whole batch in lockstep."""
    made, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        policy.act(observations, temperature=1.6)
        made += len(observations)
    return made / (time.perf_counter() - began)


def main() -> None:
    """Measure, print a table and the JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=("tiny", "7b"), default="tiny")
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy = make_policy(options.size, device)
    other = PlainPolicy(policy.config, policy.network, policy.tokenizer)
    observations = [make_observation(policy.config, seed) for seed in range(options.envs)]
    ways = {
        "ours_per_s": lambda: uvloop.run(ours(policy, observations, options.seconds)),
        "plain_per_s": lambda: plain(other, observations, options.seconds),
    }
    if device.type == "cuda":
        ways["ours_without_graphs_per_s"] = lambda: uvloop.run(
            ours(policy, observations, options.seconds, cuda_graphs=False)
        )
    rates = measure_in_turn(ways, options.rounds)
    figures = {"decisions_speedup": rates["ours_per_s"] / rates["plain_per_s"], **rates}
    if device.type == "cuda":
        figures["graphs_speedup"] = rates["ours_per_s"] / rates["ours_without_graphs_per_s"]
    print_table(f"decisions a second, {options.envs} episodes, {options.size} on {device}", figures)
    print_json_line(figures)


if __name__ == "__main__":
    main()
