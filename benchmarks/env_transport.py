"""Control steps a second through env handles, against what people use today: `python -m benchmarks.env_transport`.

Each step brings two 224x224x3 frames and 8 floats (301 KB) from a simulator that costs nothing, so that only transport is
measured. Ours: one coroutine for each env handle, as episodes use them (`read in place`: the frames are used where they lie;
`copied out`: copied into memory of one's own), and the vector env in lockstep. Peers: gymnasium's AsyncVectorEnv with shared
memory, stable-baselines3's SubprocVecEnv, Ray actors. Limits: copying the bytes once, and `bare ZeroMQ`, which is the
frames in shared memory and a note over ZeroMQ with no runtime around them. All take turns, round after round.

Prints a table, and as its last line a JSON object of ratios; goals: vs_gym_shm_1 >= 1.3, vs_gym_shm_16 >= 1.5,
vs_gym_shm_nocopy_16 >= 1.2, vs_sb3_16 >= 8, vs_ray_16 >= 25. `share_of_zmq_floor_16` is ours over bare ZeroMQ, and
`zmq_floor_vs_...` what bare ZeroMQ itself reaches against a peer: more than that no runtime over ZeroMQ can.
"""

import argparse
import asyncio
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from typing import Any

import numpy as np
import uvloop
from gymnasium.vector import AsyncVectorEnv

from benchmarks.bare_zmq import BareSimulators
from benchmarks.frames_env import FRAME, FRAMES_ID, FramesEnv
from benchmarks.interleaved import measure_in_turn, print_json_line, print_table
from vla_rl.actors import Runtime
from vla_rl.simulation import EnvHandle, make_vec, open_env

Way = Callable[[], float]
ACTION = np.zeros(7, np.float32)


def steps_per_second(run_steps: Callable[[int], None], num_envs: int, seconds: float) -> float:
    """Run a hundredth to find the pace, then about `seconds` of vector steps; control steps a second over all envs."""
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds / 5:
        run_steps(5)
        count += 5
    num_steps = max(10, int(count * 4))
    began = time.perf_counter()
    run_steps(num_steps)
    return num_steps * num_envs / (time.perf_counter() - began)


def copying_once(seconds: float) -> float:
    """The limit: each step's bytes copied once, out of 16 sources in turn."""
    rng = np.random.default_rng(0)
    sources = [[rng.integers(0, 256, FRAME, dtype=np.uint8) for _ in range(2)] for _ in range(16)]
    targets = [[np.empty(FRAME, np.uint8) for _ in range(2)] for _ in range(16)]

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            for source, target in zip(sources, targets, strict=True):
                for frame, place in zip(source, target, strict=True):
                    np.copyto(place, frame)

    return steps_per_second(run, 16, seconds)


@contextmanager
def gym_shm(num_envs: int, copy: bool, seconds: float) -> Iterator[Way]:
    """gymnasium's AsyncVectorEnv with its default, shared memory."""
    envs = AsyncVectorEnv([FramesEnv] * num_envs, shared_memory=True, copy=copy)
    envs.reset(seed=0)
    actions = np.zeros((num_envs, 7), np.float32)

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            envs.step(actions)

    try:
        yield lambda: steps_per_second(run, num_envs, seconds)
    finally:
        envs.close()


@contextmanager
def sb3_subproc(num_envs: int, seconds: float) -> Iterator[Way]:
    """stable-baselines3's SubprocVecEnv."""
    from stable_baselines3.common.vec_env import SubprocVecEnv

    envs = SubprocVecEnv([FramesEnv] * num_envs)
    envs.reset()
    actions = np.zeros((num_envs, 7), np.float32)

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            envs.step(actions)

    try:
        yield lambda: steps_per_second(run, num_envs, seconds)
    finally:
        envs.close()


@contextmanager
def ray_actors(num_envs: int, seconds: float) -> Iterator[Way]:
    """One Ray actor for each env, all asked at once."""
    os.environ["RAY_AUTH_MODE"] = "disabled"  # or it writes a token into the home folder
    import ray

    ray.init(num_cpus=num_envs, include_dashboard=False, log_to_driver=False, object_store_memory=500 * 2**20)
    worker: Any = ray.remote(FramesEnv)
    envs = [worker.remote() for _ in range(num_envs)]
    ray.get([env.reset.remote() for env in envs])

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            ray.get([env.step.remote(ACTION) for env in envs])

    try:
        yield lambda: steps_per_second(run, num_envs, seconds)
    finally:
        ray.shutdown()


@contextmanager
def bare_zmq(num_envs: int, seconds: float) -> Iterator[Way]:
    """The floor; see `benchmarks.bare_zmq`."""
    with BareSimulators(num_envs) as simulators:

        def run(num_steps: int) -> None:
            for _ in range(num_steps):
                simulators.step()

        yield lambda: steps_per_second(run, num_envs, seconds)


@contextmanager
def our_vector(num_envs: int, copy: bool, seconds: float) -> Iterator[Way]:
    """Our vector env, in lockstep over the same kind of processes."""
    envs = make_vec(FRAMES_ID, num_envs, copy=copy)
    envs.reset(seed=0)
    actions = np.zeros((num_envs, 7), np.float32)

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            envs.step(actions)

    try:
        yield lambda: steps_per_second(run, num_envs, seconds)
    finally:
        envs.close()


async def play(env: EnvHandle, num_steps: int, copy_out: bool) -> None:
    """One coroutine for each env, as an episode has."""
    for _ in range(num_steps):
        observation, *_ = await env.step(ACTION)
        if copy_out:
            observation["image"].copy()
            observation["wrist_image"].copy()


def our_handles(envs: list[EnvHandle], copy_out: bool, seconds: float, loop: asyncio.AbstractEventLoop) -> Way:
    """Env handles, played from the thread that measures everything in turn."""

    async def play_all(num_steps: int) -> None:
        await asyncio.gather(*(play(env, num_steps, copy_out) for env in envs))

    def run(num_steps: int) -> None:
        asyncio.run_coroutine_threadsafe(play_all(num_steps), loop).result()

    return lambda: steps_per_second(run, len(envs), seconds)


async def measure_with_ours(ways: dict[str, Way], rounds: int, seconds: float) -> dict[str, float]:
    """Open our env handles beside the peers and measure all in turn, in a thread, so that this loop is free for ours."""
    loop = asyncio.get_running_loop()
    async with Runtime(name="benchmark") as runtime, AsyncExitStack() as stack:
        envs = [await stack.enter_async_context(open_env(runtime, FRAMES_ID, name=f"frames-{i}")) for i in range(16)]
        await asyncio.gather(*(env.reset(seed=0) for env in envs))
        for number in (1, 16):
            ways[f"ours, read in place, {number}"] = our_handles(envs[:number], False, seconds, loop)
            ways[f"ours, copied out, {number}"] = our_handles(envs[:number], True, seconds, loop)
        return await asyncio.to_thread(measure_in_turn, ways, rounds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each way, in each round")
    parser.add_argument("--without-ray", action="store_true", help="leave out the slowest peer")
    options = parser.parse_args()
    seconds = options.seconds
    warnings.simplefilter("ignore")  # the peers' own deprecations
    with ExitStack() as stack:
        ways: dict[str, Way] = {}  # peers fork: they come before any thread or loop of ours
        for number in (1, 16):
            ways[f"gym shm, {number}"] = stack.enter_context(gym_shm(number, True, seconds))
            ways[f"gym shm nocopy, {number}"] = stack.enter_context(gym_shm(number, False, seconds))
        ways["sb3, 16"] = stack.enter_context(sb3_subproc(16, seconds))
        for number in (1, 16):
            ways[f"bare ZeroMQ, {number}"] = stack.enter_context(bare_zmq(number, seconds))
        if not options.without_ray:
            ways["ray, 16"] = stack.enter_context(ray_actors(16, seconds))
        ways["our vector env, 16"] = stack.enter_context(our_vector(16, True, seconds))
        ways["our vector env nocopy, 16"] = stack.enter_context(our_vector(16, False, seconds))
        ways["memcpy, 16"] = lambda: copying_once(seconds / 4)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            rates = runner.run(measure_with_ours(ways, options.rounds, seconds))
    print_table("control steps a second", dict(sorted(rates.items())))
    print_json_line(ratios(rates))


def ratios(rates: dict[str, float]) -> dict[str, float]:
    """Ours over each peer: read in place against peers that also hand out their buffers, and against those that copy."""
    ours_1, ours_16 = rates["ours, read in place, 1"], rates["ours, read in place, 16"]
    figures = {
        "vs_gym_shm_1": ours_1 / rates["gym shm, 1"],
        "vs_gym_shm_16": ours_16 / rates["gym shm, 16"],
        "vs_gym_shm_nocopy_16": ours_16 / rates["gym shm nocopy, 16"],
        "vs_sb3_16": ours_16 / rates["sb3, 16"],
        "share_of_memcpy_16": ours_16 / rates["memcpy, 16"],
        "copied_out_vs_gym_shm_16": rates["ours, copied out, 16"] / rates["gym shm, 16"],
        "vector_vs_gym_shm_16": rates["our vector env, 16"] / rates["gym shm, 16"],
        "vector_nocopy_vs_gym_shm_nocopy_16": rates["our vector env nocopy, 16"] / rates["gym shm nocopy, 16"],
    }
    floor_16 = rates["bare ZeroMQ, 16"]
    figures |= {
        "share_of_zmq_floor_1": ours_1 / rates["bare ZeroMQ, 1"],
        "share_of_zmq_floor_16": ours_16 / floor_16,
        "vector_share_of_zmq_floor_16": rates["our vector env nocopy, 16"] / floor_16,
        "zmq_floor_vs_gym_shm_1": rates["bare ZeroMQ, 1"] / rates["gym shm, 1"],
        "zmq_floor_vs_gym_shm_16": floor_16 / rates["gym shm, 16"],
        "zmq_floor_vs_gym_shm_nocopy_16": floor_16 / rates["gym shm nocopy, 16"],
        "zmq_floor_vs_sb3_16": floor_16 / rates["sb3, 16"],
    }
    if "ray, 16" in rates:
        figures["vs_ray_16"] = ours_16 / rates["ray, 16"]
        figures["zmq_floor_vs_ray_16"] = floor_16 / rates["ray, 16"]
    return figures


if __name__ == "__main__":
    main()
