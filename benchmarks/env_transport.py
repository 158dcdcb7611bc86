"""Control steps a second through env handles, compared with common tools:
`python -m benchmarks.env_transport`.

Each step transports two 224x224x3 frames and 8 floats (301 KB) from a simulator without
computation, so that only transport is measured. Ours: one coroutine for each lease of a pool, as in
episodes (`read in place`: the frames are read in shared memory; `copied out`: they are copied into
private memory), and the vector env in lockstep. Peers: gymnasium's AsyncVectorEnv with shared
memory, stable-baselines3's SubprocVecEnv, Ray actors. Limits: copying the bytes once, and
`bare ZeroMQ`, which is the frames in shared memory and a short message over ZeroMQ, without a
runtime. All take turns, round after round.

Sixteen of ours are measured in the setting that we recommend for environments this cheap, a process
for each core with several environments in it (`SimulatorConfig.envs_per_process`; the JSON names it
as `setting`), and in a process for each environment, the default (`own_process_...`). gymnasium and
stable-baselines3 have no such setting. A Ray actor can hold several environments and step them for
one call; then they step in lockstep (`vector_vs_packed_ray_16` compares that with our vector env).

Prints a table, and as its last line a JSON object of ratios; goals: vs_gym_shm_1 >= 1.3,
vs_gym_shm_16 >= 1.5, vs_gym_shm_nocopy_16 >= 1.2, vs_sb3_16 >= 8, vs_ray_16 >= 25.
`own_process_share_of_zmq_floor_16` is ours over bare ZeroMQ, with a process for each environment on
both sides, and `zmq_floor_vs_...` is bare ZeroMQ over a peer: no runtime over ZeroMQ with the same
number of processes can be faster.
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
from vla_rl.env_workers import SimulatorConfig, SimulatorPool, make_vec
from vla_rl.types import Env, EnvSpec, EpisodeSpec

Way = Callable[[], float]
ACTION = np.zeros(7, np.float32)
NUM_ENVS = 16
PACKED = SimulatorConfig(num_envs=NUM_ENVS, envs_per_process=-(-NUM_ENVS // (os.cpu_count() or 1)))
OWN_PROCESS = SimulatorConfig(num_envs=NUM_ENVS)
SETTINGS = {"packed": PACKED, "own process": OWN_PROCESS}


def steps_per_second(run_steps: Callable[[int], None], num_envs: int, seconds: float) -> float:
    """Run a hundredth to find the speed, then about `seconds` of vector steps.

    Return control steps a second of all envs.
    """
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds / 5:
        run_steps(5)
        count += 5
    num_steps = max(10, int(count * 4))
    began = time.perf_counter()
    run_steps(num_steps)
    return num_steps * num_envs / (time.perf_counter() - began)


def copying_once(seconds: float) -> float:
    """Measure the limit: each step's bytes copied once, from 16 sources in turn."""
    rng = np.random.default_rng(0)
    sources = [[rng.integers(0, 256, FRAME, dtype=np.uint8) for _ in range(2)] for _ in range(16)]
    targets = [[np.empty(FRAME, np.uint8) for _ in range(2)] for _ in range(16)]

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            for source, target in zip(sources, targets, strict=True):
                for frame, slot in zip(source, target, strict=True):
                    np.copyto(slot, frame)

    return steps_per_second(run, 16, seconds)


@contextmanager
def gym_shm(num_envs: int, copy: bool, seconds: float) -> Iterator[Way]:
    """Yield gymnasium's AsyncVectorEnv with its default, shared memory."""
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
    """Yield stable-baselines3's SubprocVecEnv."""
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


class RayFrames:
    """Several environments in one Ray actor, stepped in lockstep."""

    def __init__(self, num_envs: int) -> None:
        self._envs = [FramesEnv() for _ in range(num_envs)]
        for env in self._envs:
            env.reset(seed=0)

    def step(self, actions: list[np.ndarray]) -> list[Any]:
        """Run one control step of each environment."""
        return [env.step(action) for env, action in zip(self._envs, actions, strict=True)]


@contextmanager
def ray_actors(seconds: float) -> Iterator[dict[str, Way]]:
    """Yield one Ray actor for each env, all called at once; and as many envs in an actor as ours in
    a process.
    """
    os.environ["RAY_AUTH_MODE"] = "disabled"  # else it writes a token into the home folder
    import ray

    ray.init(
        num_cpus=2 * NUM_ENVS,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=500 * 2**20,
    )
    worker: Any = ray.remote(FramesEnv)
    envs = [worker.remote() for _ in range(NUM_ENVS)]
    ray.get([env.reset.remote() for env in envs])
    packed_worker: Any = ray.remote(RayFrames)
    sizes = PACKED.split_envs(NUM_ENVS)
    packed = [packed_worker.remote(size) for size in sizes]
    actions = [[ACTION] * size for size in sizes]

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            ray.get([env.step.remote(ACTION) for env in envs])

    def run_packed(num_steps: int) -> None:
        for _ in range(num_steps):
            ray.get([actor.step.remote(own) for actor, own in zip(packed, actions, strict=True)])

    try:
        yield {
            "ray, 16": lambda: steps_per_second(run, NUM_ENVS, seconds),
            "ray packed, 16": lambda: steps_per_second(run_packed, NUM_ENVS, seconds),
        }
    finally:
        ray.shutdown()


@contextmanager
def bare_zmq(num_envs: int, seconds: float) -> Iterator[Way]:
    """Yield the lower bound; see `benchmarks.bare_zmq`."""
    with BareSimulators(num_envs) as simulators:

        def run(num_steps: int) -> None:
            for _ in range(num_steps):
                simulators.step()

        yield lambda: steps_per_second(run, num_envs, seconds)


@contextmanager
def our_vector(config: SimulatorConfig, copy: bool, seconds: float) -> Iterator[Way]:
    """Yield our vector env, in lockstep over the same kind of processes."""
    envs = make_vec(FRAMES_ID, NUM_ENVS, copy=copy, config=config)
    envs.reset(seed=0)
    actions = np.zeros((NUM_ENVS, 7), np.float32)

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            envs.step(actions)

    try:
        yield lambda: steps_per_second(run, NUM_ENVS, seconds)
    finally:
        envs.close()


async def run_env(env: Env, num_steps: int, copy_out: bool) -> None:
    """Step one env in a coroutine, like an episode."""
    for _ in range(num_steps):
        observation, *_ = await env.step(ACTION)
        if copy_out:
            observation["image"].copy()
            observation["wrist_image"].copy()


def our_handles(
    envs: list[Env], copy_out: bool, seconds: float, loop: asyncio.AbstractEventLoop
) -> Way:
    """Make a way that steps leased environments, called from the thread that measures everything in
    turn.
    """

    async def run_all(num_steps: int) -> None:
        await asyncio.gather(*(run_env(env, num_steps, copy_out) for env in envs))

    def run(num_steps: int) -> None:
        asyncio.run_coroutine_threadsafe(run_all(num_steps), loop).result()

    return lambda: steps_per_second(run, len(envs), seconds)


async def leases(pool: SimulatorPool, stack: AsyncExitStack) -> list[Env]:
    """Lease all simulators of the pool, each at the start of an episode that never ends."""
    spec = EnvSpec(id=FRAMES_ID)
    episodes = (
        EpisodeSpec(
            episode_id=i, group_id=i, member=0, env=spec, task="frames", seed=i, policy_seed=i
        )
        for i in range(pool.num_envs)
    )
    envs: list[Env] = [await stack.enter_async_context(pool.lease(episode)) for episode in episodes]
    await asyncio.gather(*(env.reset() for env in envs))
    return envs


async def measure_with_ours(ways: dict[str, Way], rounds: int, seconds: float) -> dict[str, float]:
    """Lease our envs and measure all ways in turn, in a thread, so that this loop is free
    for ours.
    """
    loop = asyncio.get_running_loop()
    async with Runtime(name="benchmark") as runtime, AsyncExitStack() as stack:
        for setting, config in SETTINGS.items():
            pool = await stack.enter_async_context(SimulatorPool(runtime, config, name=setting))
            envs = await leases(pool, stack)
            ways[f"ours {setting}, read in place, 16"] = our_handles(envs, False, seconds, loop)
            ways[f"ours {setting}, copied out, 16"] = our_handles(envs, True, seconds, loop)
            if config is OWN_PROCESS:
                ways["ours, read in place, 1"] = our_handles(envs[:1], False, seconds, loop)
                ways["ours, copied out, 1"] = our_handles(envs[:1], True, seconds, loop)
        return await asyncio.to_thread(measure_in_turn, ways, rounds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="seconds for each way in each round; default 1"
    )
    parser.add_argument(
        "--without-ray", action="store_true", help="do not measure Ray, the slowest peer"
    )
    options = parser.parse_args()
    seconds = options.seconds
    warnings.simplefilter("ignore")  # the peers' own deprecations
    with ExitStack() as stack:
        ways: dict[str, Way] = {}  # peers fork: start them before any thread or loop of ours
        for number in (1, NUM_ENVS):
            ways[f"gym shm, {number}"] = stack.enter_context(gym_shm(number, True, seconds))
            ways[f"gym shm nocopy, {number}"] = stack.enter_context(gym_shm(number, False, seconds))
        ways["sb3, 16"] = stack.enter_context(sb3_subproc(NUM_ENVS, seconds))
        for number in (1, NUM_ENVS):
            ways[f"bare ZeroMQ, {number}"] = stack.enter_context(bare_zmq(number, seconds))
        if not options.without_ray:
            ways |= stack.enter_context(ray_actors(seconds))
        for setting, config in SETTINGS.items():
            ways[f"our vector env {setting}, 16"] = stack.enter_context(
                our_vector(config, True, seconds)
            )
            ways[f"our vector env {setting} nocopy, 16"] = stack.enter_context(
                our_vector(config, False, seconds)
            )
        ways["memcpy, 16"] = lambda: copying_once(seconds / 4)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            rates = runner.run(measure_with_ours(ways, options.rounds, seconds))
    print_table("control steps a second", dict(sorted(rates.items())))
    print_json_line({"setting": f"envs_per_process={PACKED.envs_per_process}", **ratios(rates)})


def ratios(rates: dict[str, float]) -> dict[str, float]:
    """Return ours over each peer.

    Reading in place is compared with peers that return their buffers and peers that copy.
    """
    ours_1, floor_16 = rates["ours, read in place, 1"], rates["bare ZeroMQ, 16"]
    figures = {"vs_gym_shm_1": ours_1 / rates["gym shm, 1"]}
    figures |= _of_setting("packed", "", rates)
    figures |= _of_setting("own process", "own_process_", rates)
    figures |= {
        "share_of_zmq_floor_1": ours_1 / rates["bare ZeroMQ, 1"],
        "own_process_share_of_zmq_floor_16": rates["ours own process, read in place, 16"]
        / floor_16,
        "own_process_vector_share_of_zmq_floor_16": rates["our vector env own process nocopy, 16"]
        / floor_16,
        "zmq_floor_vs_gym_shm_1": rates["bare ZeroMQ, 1"] / rates["gym shm, 1"],
        "zmq_floor_vs_gym_shm_16": floor_16 / rates["gym shm, 16"],
        "zmq_floor_vs_gym_shm_nocopy_16": floor_16 / rates["gym shm nocopy, 16"],
        "zmq_floor_vs_sb3_16": floor_16 / rates["sb3, 16"],
    }
    if "ray, 16" in rates:
        figures["zmq_floor_vs_ray_16"] = floor_16 / rates["ray, 16"]
        figures["vector_vs_packed_ray_16"] = (
            rates["our vector env packed nocopy, 16"] / rates["ray packed, 16"]
        )
    return figures


def _of_setting(setting: str, prefix: str, rates: dict[str, float]) -> dict[str, float]:
    """Return the figures of sixteen of ours in one setting."""
    ours = rates[f"ours {setting}, read in place, 16"]
    vector, vector_nocopy = (
        rates[f"our vector env {setting}{kind}, 16"] for kind in ("", " nocopy")
    )
    figures = {
        "vs_gym_shm_16": ours / rates["gym shm, 16"],
        "vs_gym_shm_nocopy_16": ours / rates["gym shm nocopy, 16"],
        "vs_sb3_16": ours / rates["sb3, 16"],
        "share_of_memcpy_16": ours / rates["memcpy, 16"],
        "copied_out_vs_gym_shm_16": rates[f"ours {setting}, copied out, 16"] / rates["gym shm, 16"],
        "vector_vs_gym_shm_16": vector / rates["gym shm, 16"],
        "vector_nocopy_vs_gym_shm_nocopy_16": vector_nocopy / rates["gym shm nocopy, 16"],
        "vector_vs_sb3_16": vector / rates["sb3, 16"],
    }
    if "ray, 16" in rates:
        figures["vs_ray_16"] = ours / rates["ray, 16"]
    return {prefix + name: value for name, value in figures.items()}


if __name__ == "__main__":
    main()
