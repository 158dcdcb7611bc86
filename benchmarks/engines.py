"""vLLM engines compared with the torch engine: agreement, speed, and the cost of updates and
deaths.

    python -m benchmarks.engines [--seconds 3] [--rounds 3] [--chunks 1000] [--kills 20]

OpenVLA-OFT and OpenVLA of about 1.4 million parameters in float32, frames of 224 x 224. Every
episode asks again as soon as it has its answer.

Keys of the last line:
    max_logprob_diff_ar, max_logprob_diff_oft   largest difference of a log-prob from the learner's
                                                own network
    decisions_per_s_1, _16, _64                 OpenVLA-OFT, with this number of episodes
    decisions_per_s_..._vs_torch                over the torch engine in the same run
    update_pause_ms, update_total_ms            of an update under traffic of 16 episodes, medians
    update_pause_share                          pause over the 2 s from one update to the next;
                                                running work ends in it
    update_time_share                           share of decisions lost to an update every 2 s; both
                                                measured in turn
    mixed_version_chunks                        chunks with tokens of another version than the named
                                                one, of `--chunks`
    requests_lost                               requests without an answer while engines were killed
"""

import argparse
import asyncio
import os
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import uvloop

from benchmarks.interleaved import print_json_line, print_table
from benchmarks.policy_sizes import make_observation, make_policy
from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine
from vla_rl.engines.vllm import VllmActionEngine, VllmConfig
from vla_rl.learner.scoring import move_choices
from vla_rl.models.openvla import OpenVla
from vla_rl.models.openvla_oft import OpenVlaOft
from vla_rl.models.prismatic.config import OpenVlaConfig
from vla_rl.models.vllm import serve
from vla_rl.types import ActionChunk, Observation, Sampling

UPDATE_EVERY_S = 2.0
UPDATES_A_ROUND = 3
TEMPERATURE = 1.6
NUM_CHECKED = 32
MIXED_ABOVE = 1e-3
"""Difference above which log-probs are of another version: those of one version agree to 1e-5,
others differ 1000 times more."""


def openvla_like(policy: OpenVlaOft) -> OpenVla:
    """Make an OpenVLA with the towers and the trunk of another policy."""
    shared = {
        name: getattr(policy.config, name)
        for name in OpenVlaConfig.__struct_fields__
        if name in type(policy.config).__struct_fields__ and name != "cameras"
    }
    return OpenVla.create(OpenVlaConfig(**shared, cameras=policy.config.cameras[:1]), seed=1)


def moved(policy: Any, seed: int) -> Any:
    """Return the same policy with other weights."""
    other, generator = policy.copy(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.network.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return other


def gaps(policy: Any, observations: list[Observation], chunks: list[ActionChunk]) -> torch.Tensor:
    """Return each chunk's largest difference from the policy's own log-probs of its tokens."""
    tokens = torch.stack([torch.from_numpy(chunk.tokens) for chunk in chunks])
    temperatures = torch.full((len(chunks),), TEMPERATURE)
    with torch.inference_mode():
        log_probs, _ = policy.log_probs(
            policy.prepare(observations), *move_choices(policy, tokens, temperatures)
        )
    reported = torch.stack([torch.from_numpy(chunk.log_probs) for chunk in chunks])
    apart: torch.Tensor = (log_probs.cpu() - reported).abs().amax(dim=1)
    return apart


class Traffic:
    """Episodes that ask an engine for one decision after the other."""

    def __init__(self, engine: Any, observations: list[Observation]) -> None:
        self._engine, self._observations = engine, observations
        self.answers: list[tuple[int, ActionChunk]] = []
        self.num_lost = 0

    async def run(self, num_episodes: int, is_over: Callable[[], bool]) -> None:
        """Run episodes until `is_over`; every episode still gets the answer that it waits for."""
        async with asyncio.TaskGroup() as tasks:
            for episode in range(num_episodes):
                tasks.create_task(self._episode(episode, is_over))

    async def _episode(self, episode: int, is_over: Callable[[], bool]) -> None:
        index = episode % len(self._observations)
        while not is_over():
            sampling = Sampling(temperature=TEMPERATURE, seed=len(self.answers))
            try:
                chunk = await self._engine.act(self._observations[index], sampling)
            except (OSError, RuntimeError, ValueError) as error:
                self.num_lost += 1
                print(f"lost: {error}", flush=True)
            else:
                self.answers.append((index, chunk))


async def rate(
    engine: Any, observations: list[Observation], num_episodes: int, seconds: float
) -> float:
    """Measure decisions a second."""
    traffic, began = Traffic(engine, observations), time.perf_counter()
    await traffic.run(num_episodes, lambda: time.perf_counter() - began > seconds)
    return len(traffic.answers) / (time.perf_counter() - began)


async def agreement(
    policy: Any, lane: DeviceLane, config: EngineConfig, observations: list[Observation]
) -> float:
    """Return the largest difference of a log-prob, over some decisions of a vLLM engine."""
    async with VllmActionEngine(serve(policy), lane, config) as engine:
        return await agreement_of(engine, policy, observations)


async def agreement_of(
    engine: VllmActionEngine, policy: Any, observations: list[Observation]
) -> float:
    """Return the same for an open engine."""
    chunks = await asyncio.gather(
        *(
            engine.act(seen, Sampling(temperature=TEMPERATURE, seed=seed))
            for seed, seen in enumerate(observations)
        )
    )
    return float(gaps(policy, observations, list(chunks)).max())


async def rates(
    engine: VllmActionEngine,
    policy: OpenVlaOft,
    lane: DeviceLane,
    observations: list[Observation],
    options: Any,
) -> dict[str, float]:
    """Measure decisions a second of both engines, in turn."""
    figures = {}
    async with TorchActionEngine(policy, lane, EngineConfig(max_batch=64)) as own:
        for num_episodes in (1, 16, 64):
            measured: dict[str, list[float]] = {"vllm": [], "torch": []}
            for _ in range(options.rounds):
                measured["vllm"].append(
                    await rate(engine, observations, num_episodes, options.seconds)
                )
                measured["torch"].append(
                    await rate(own, observations, num_episodes, options.seconds)
                )
            ours, theirs = statistics.median(measured["vllm"]), statistics.median(measured["torch"])
            figures[f"decisions_per_s_{num_episodes}"] = ours
            figures[f"decisions_per_s_{num_episodes}_vs_torch"] = ours / theirs
    return figures


async def updates(
    engine: VllmActionEngine,
    policy: OpenVlaOft,
    lane: DeviceLane,
    observations: list[Observation],
    num_chunks: int,
) -> dict[str, float]:
    """Measure the cost of updates under traffic, and count chunks that mix versions."""
    versions = {version: moved(policy, version % 3) for version in range(1, 4)}
    traffic, count = Traffic(engine, observations), 0
    first = len(engine.update_times)

    async def publish() -> None:
        nonlocal count
        while len(traffic.answers) < num_chunks:
            count += 1
            versions[count] = versions[1 + count % 3]
            await lane.run(engine.apply_weights, versions[count].network, count)
            await asyncio.sleep(UPDATE_EVERY_S / 4)  # four times as often as for the reported share

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(publish())
        tasks.create_task(traffic.run(16, lambda: len(traffic.answers) >= num_chunks))
    mixed = 0
    by_version: dict[int, list[tuple[int, ActionChunk]]] = {}
    for index, chunk in traffic.answers:
        by_version.setdefault(chunk.weight_version, []).append((index, chunk))
    for version, answers in by_version.items():
        acting = versions.get(version, policy)
        for begin in range(0, len(answers), NUM_CHECKED):
            part = answers[begin : begin + NUM_CHECKED]
            apart = gaps(
                acting, [observations[index] for index, _ in part], [chunk for _, chunk in part]
            )
            mixed += int((apart > MIXED_ABOVE).sum())
    times = engine.update_times[first:]
    pause = statistics.median(time.pause_s for time in times)
    return {
        "update_pause_ms": 1000.0 * pause,
        "update_total_ms": 1000.0 * statistics.median(time.total_s for time in times),
        "update_pause_share": pause / UPDATE_EVERY_S,
        "mixed_version_chunks": mixed,
    }


async def share_lost(
    engine: VllmActionEngine,
    policy: OpenVlaOft,
    lane: DeviceLane,
    observations: list[Observation],
    rounds: int,
) -> float:
    """Return the share of decisions a second that is lost to updates."""
    newer, version = moved(policy, 7), max(engine.weight_version, 0)
    seconds = UPDATES_A_ROUND * UPDATE_EVERY_S
    kept = []
    for _ in range(rounds):
        without = await rate(engine, observations, 16, seconds)
        async with asyncio.TaskGroup() as tasks:
            with_updates = tasks.create_task(rate(engine, observations, 16, seconds))
            for number in range(UPDATES_A_ROUND):
                await asyncio.sleep((0.5 if number == 0 else 1.0) * UPDATE_EVERY_S)
                version += 1
                tasks.create_task(lane.run(engine.apply_weights, newer.network, version))
        kept.append(with_updates.result() / without)
    return 1.0 - statistics.median(kept)


async def deaths(
    policy: OpenVlaOft, lane: DeviceLane, observations: list[Observation], num_kills: int
) -> int:
    """Count requests without an answer while one of two engines is killed repeatedly."""
    config = EngineConfig(vllm=VllmConfig(num_engines=2))
    async with VllmActionEngine(serve(policy), lane, config) as engine:
        traffic, is_over = Traffic(engine, observations), asyncio.Event()

        async def kill() -> None:
            for number in range(num_kills):
                while len(engine.pids) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                os.kill(engine.pids[number % 2], signal.SIGKILL)
                await asyncio.sleep(0.2)
            while len(engine.pids) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            is_over.set()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(kill())
            tasks.create_task(traffic.run(4, is_over.is_set))
        print(f"{num_kills} kills, {len(traffic.answers)} answers", flush=True)
        return traffic.num_lost


async def measure(options: Any) -> dict[str, float]:
    """Measure all figures."""
    policy = make_policy("tiny", torch.device("cpu"))
    observations = [make_observation(policy.config, seed) for seed in range(16)]
    config = EngineConfig()
    async with DeviceLane(num_threads=1) as lane:
        figures = {
            "max_logprob_diff_ar": await agreement(openvla_like(policy), lane, config, observations)
        }
        async with VllmActionEngine(serve(policy), lane, config) as engine:
            figures["max_logprob_diff_oft"] = await agreement_of(engine, policy, observations)
            figures |= await rates(engine, policy, lane, observations, options)
            figures |= await updates(engine, policy, lane, observations, options.chunks)
            figures["update_time_share"] = await share_lost(
                engine, policy, lane, observations, options.rounds
            )
        figures["requests_lost"] = await deaths(policy, lane, observations, options.kills)
    return figures


def main() -> None:
    """Measure, print a table and the JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chunks", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=20)
    figures = uvloop.run(measure(parser.parse_args()))
    print_table("vLLM engines, OpenVLA-OFT and OpenVLA, float32", figures)
    print_json_line(figures)


if __name__ == "__main__":
    main()
