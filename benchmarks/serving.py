"""A policy server under load: its own cost, batches over connections, kills, reloads, idle clients.

`python -m benchmarks.serving [--quick]`; the last line is JSON:

    roundtrip_overhead_ms       median ms of an answer (two images of 224 pixels), less the policy's own time
    vs_openpi_server            answers per second of 16 clients, over a server that answers one after the other,
                                as openpi's does, with a policy of 20 ms and 0.5 ms a row
    vs_openpi_server_shipped    the same with the shipped base policy (3.6 million parameters), computed on the CPU
    replies_lost                answers owed to clients that live, while others are killed (2,000 of them)
    reloads_mixed               answers of two weight versions at once, or of another than they say, over 200 reloads
    idle_connections            connections held beside 16 that work
    idle_slowdown               median answer of the 16 beside them, over that without them

Clients run in processes of their own. Servers and loads take turns.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import uvloop
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve

from benchmarks.interleaved import print_json_line, print_table
from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine
from vla_rl.engines.policy_model import PolicyModel
from vla_rl.models.example_inputs import example_observation
from vla_rl.models.loading import CheckpointConfig, load_policy
from vla_rl.models.mlp import MlpConfig, MlpPolicy
from vla_rl.models.shipped import BASE_POLICY
from vla_rl.rollout import DynamicBatcher
from vla_rl.rollout.engines import ActionEngine
from vla_rl.serving import Entry, ObservationReader, PolicyServer, ServerConfig, read_map
from vla_rl.serving.observation_maps import find_entries
from vla_rl.serving.openpi_messages import decode_message, encode_message, flatten_names
from vla_rl.types import ActionChunk, Observation, Sampling

CALL_S: Final = 0.02
ROW_S: Final = 0.0005
WORKING: Final = 16
ROBOT: Final = {
    "image": Entry("image"), "wrist_image": Entry("image"), "state": Entry("vector", 8), "instruction": Entry("text")
}  # fmt: skip
GREEDY: Final = Sampling(greedy=True)


class TimedEngine:
    """An engine that takes 20 ms for a batch and 0.5 ms for a row, as a GPU would."""

    weight_version = 0

    def __init__(self) -> None:
        self.batcher: DynamicBatcher[Observation, ActionChunk] = DynamicBatcher(
            self._decide, max_batch=WORKING
        )

    async def act(self, observation: Observation, sampling: Sampling) -> ActionChunk:
        """Return a chunk of eight rows."""
        return await self.batcher.submit(observation)

    async def _decide(self, observations: list[Observation]) -> list[ActionChunk]:
        await asyncio.sleep(CALL_S + ROW_S * len(observations))
        return [make_chunk(0.0, 0)] * len(observations)


def make_chunk(value: float, version: int) -> ActionChunk:
    """Return a chunk whose numbers all are `value`."""
    actions = np.full((8, 7), value, np.float32)
    zeros = np.zeros(actions.size, np.float32)
    return ActionChunk(actions=actions, tokens=zeros, log_probs=zeros, weight_version=version)


@asynccontextmanager
async def our_server(
    engine: ActionEngine,
    entries: dict[str, Entry] = ROBOT,
    check: Callable[[Observation], Any] = id,
) -> AsyncIterator[str]:
    """Serve an engine; yield the address."""
    reader = ObservationReader(entries, read_map(["libero"]))
    async with PolicyServer(engine, reader, ServerConfig(port=0), GREEDY, dict, check) as server:
        yield server.address


@asynccontextmanager
async def plain_server(decide: Callable[[dict[str, Any]], np.ndarray]) -> AsyncIterator[str]:
    """Serve a function as openpi's server does: in the loop, one observation after the other."""

    async def answer(connection: ServerConnection) -> None:
        await connection.send(encode_message({}))
        with contextlib.suppress(Exception):
            while True:
                frame = await connection.recv()
                assert isinstance(frame, bytes)
                await connection.send(encode_message({"actions": decide(decode_message(frame))}))

    async with serve(answer, "127.0.0.1", 0, compression=None, max_size=None) as server:
        yield f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"


class Load(NamedTuple):
    """Answers that the clients of one process got.

    Example:
        Load(answers_per_s=61.2, median_ms=24.1, lost=0)
    """

    answers_per_s: float
    median_ms: float
    lost: int


def robot_observation() -> dict[str, Any]:
    """Return what openpi's LIBERO client sends."""
    images = np.random.default_rng(0).integers(0, 256, (2, 224, 224, 3), dtype=np.uint8)
    return {
        "observation/image": images[0],
        "observation/wrist_image": images[1],
        "observation/state": np.zeros(8),
        "prompt": "pick up the black bowl and place it on the plate",
    }


def run_clients(address: str, num_clients: int, seconds: float) -> Load:
    """Ask with some clients for some time, each waiting for its answer."""
    return uvloop.run(_run_clients(address, num_clients, seconds))


async def _run_clients(address: str, num_clients: int, seconds: float) -> Load:
    frame, until = encode_message(robot_observation()), time.monotonic() + seconds
    times: list[float] = []
    lost = 0

    async def ask() -> None:
        nonlocal lost
        async with opened(address) as connection:
            while time.monotonic() < until:
                started_at = time.monotonic()
                await connection.send(frame)
                lost += 1
                answer = await connection.recv()
                lost -= 1
                assert isinstance(answer, bytes), answer
                times.append(time.monotonic() - started_at)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(num_clients):
            tasks.create_task(ask())
    return Load(len(times) / seconds, 1e3 * statistics.median(times), lost)


@asynccontextmanager
async def opened(address: str) -> AsyncIterator[ClientConnection]:
    """Open a connection as openpi's client does, and read the metadata."""
    async with connect(address, compression=None, max_size=None, ping_interval=None) as connection:
        await connection.recv()
        yield connection


def kill_clients(address: str, count: int) -> int:
    """Connect, send observations and die without a word, `count` times; return how often."""
    return uvloop.run(_kill_clients(address, count))


async def _kill_clients(address: str, count: int) -> int:
    frame = encode_message(robot_observation())
    for number in range(count):
        connection = await connect(address, compression=None, max_size=None)
        # at every moment: before the metadata, with none, one or several answers owed, within a frame
        if number % 4:
            await connection.recv()
        for _ in range(number % 3):
            await connection.send(frame)
        if number % 5 == 0:
            connection.transport.write(frame[: len(frame) // 2])
        connection.transport.abort()
    return count


def hold_idle(address: str, count: int, opened_all: Any, end: Any) -> int:
    """Hold connections that send nothing until `end` is set; return how many were open then."""
    return uvloop.run(_hold_idle(address, count, opened_all, end))


async def _hold_idle(address: str, count: int, opened_all: Any, end: Any) -> int:
    held = []
    for start in range(0, count, 100):
        batch = (connect(address, compression=None) for _ in range(min(100, count - start)))
        held += await asyncio.gather(*batch)
    opened_all.release()
    await asyncio.to_thread(end.wait)
    return sum(connection.state.name == "OPEN" for connection in held)


class Runs:
    """Runs loads in processes of their own.

    Args:
        pool: the processes. seconds: length of a load.
    """

    def __init__(self, pool: ProcessPoolExecutor, seconds: float) -> None:
        self._pool, self.seconds = pool, seconds

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in a process."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def load(self, address: str, num_clients: int = WORKING) -> Load:
        """Return what clients in a process saw."""
        load: Load = await self.run(run_clients, address, num_clients, self.seconds)
        return load


async def measure_overhead(runs: Runs) -> float:
    """Return the server's ms above the policy's own for one client."""
    engine = TimedEngine()
    async with engine.batcher, our_server(engine) as address:
        load = await runs.load(address, 1)
    return load.median_ms - 1e3 * (CALL_S + ROW_S)


async def measure_timed(runs: Runs, rounds: int) -> float:
    """Return our answers per second over those one after the other, with a policy that takes time."""

    def decide(message: dict[str, Any]) -> np.ndarray:
        time.sleep(CALL_S + ROW_S)
        return np.zeros((8, 7))

    engine, ratios = TimedEngine(), []
    async with engine.batcher, our_server(engine) as ours, plain_server(decide) as plain:
        for _ in range(rounds):
            loads = [await runs.load(address) for address in (ours, plain)]
            ratios.append(loads[0].answers_per_s / loads[1].answers_per_s)
    return statistics.median(ratios)


async def measure_shipped(runs: Runs, rounds: int) -> float:
    """Return the same with the policy that ships, computed on one core."""
    torch.set_num_threads(1)
    model: Any = load_policy(str(BASE_POLICY), CheckpointConfig(), "cpu")
    example = example_observation(model)
    assert example is not None
    entries, ratios = find_entries(example), []
    reader = ObservationReader(entries, read_map(["libero"]))
    async with (
        DeviceLane(1) as lane,
        TorchActionEngine(model, lane, EngineConfig(max_batch=WORKING)) as engine,
        our_server(engine, entries) as ours,
        plain_server(lambda message: decide_alone(model, reader, message)) as plain,
    ):
        for _ in range(rounds):
            loads = [await runs.load(address) for address in (ours, plain)]
            ratios.append(loads[0].answers_per_s / loads[1].answers_per_s)
    return statistics.median(ratios)


def decide_alone(
    model: PolicyModel[Any], reader: ObservationReader, message: dict[str, Any]
) -> np.ndarray:
    """Return the chunk of one observation, computed here and now."""
    with torch.inference_mode():
        batch = model.prepare([reader.read(flatten_names(message))])
        sampled = model.sample(batch, [GREEDY])
        actions: np.ndarray = model.decode(sampled.tokens.numpy())[0]
    return actions


async def measure_kills(runs: Runs, num_kills: int) -> int:
    """Return the answers that living clients did not get while others were killed."""
    engine = TimedEngine()
    async with engine.batcher, our_server(engine) as address:
        killing = asyncio.ensure_future(runs.run(kill_clients, address, num_kills))
        lost = 0
        while not killing.done():
            lost += (await runs.load(address)).lost
        await killing
        return lost + (await runs.load(address)).lost


async def measure_reloads(num_reloads: int) -> int:
    """Return the answers whose numbers are not those of the weights that they name."""
    shape = MlpConfig(
        state_size=1,
        action_low=(0.0,),
        action_high=(1000.0,),
        num_bins=1001,
        chunk_size=8,
        hidden=(8,),
    )
    policies = [constant_policy(shape, number) for number in range(num_reloads + 1)]
    frame = encode_message({"state": np.ones(1)})
    mixed = 0

    async def ask(address: str) -> None:
        nonlocal mixed
        async with opened(address) as connection:
            while True:
                await connection.send(frame)
                answer = await connection.recv()
                assert isinstance(answer, bytes), answer
                message = decode_message(answer)
                mixed += not (np.rint(message["actions"]) == message["weight_version"]).all()

    async with (
        DeviceLane(1) as lane,
        TorchActionEngine(policies[0], lane, EngineConfig()) as engine,
        our_server(engine, {"state": Entry("vector", 1)}) as address,
    ):
        asking = [asyncio.ensure_future(ask(address)) for _ in range(8)]
        for number in range(1, num_reloads + 1):
            await asyncio.sleep(0.005)
            await lane.run(engine.apply_weights, policies[number].network, number)
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
    return mixed


def constant_policy(shape: MlpConfig, action: int) -> MlpPolicy:
    """Return a policy that always takes one action."""
    policy = MlpPolicy.create(shape, seed=0)
    with torch.no_grad():
        for parameter in policy.network.parameters():
            parameter.zero_()
        policy.network.get_parameter("head.bias").view(8, shape.num_bins)[:, action] = 100.0
    return policy


async def measure_idle(runs: Runs, num_idle: int, rounds: int) -> tuple[int, float]:
    """Return the idle connections that were held, and how much slower 16 others were beside them."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        opened_all, end = manager.Semaphore(0), manager.Event()
        engine = TimedEngine()
        async with engine.batcher, our_server(engine) as address:
            alone = [(await runs.load(address)).median_ms for _ in range(rounds)]
            shares = [num_idle // 2, num_idle - num_idle // 2]
            holding = [
                asyncio.ensure_future(runs.run(hold_idle, address, share, opened_all, end))
                for share in shares
            ]
            for _ in shares:
                await asyncio.to_thread(opened_all.acquire)
            concurrent = [(await runs.load(address)).median_ms for _ in range(rounds)]
            end.set()
            held: Sequence[int] = await asyncio.gather(*holding)
    return sum(held), statistics.median(concurrent) / statistics.median(alone)


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    quick: bool = options.quick
    rounds, seconds = (1, 0.3) if quick else (3, 4.0)
    with ProcessPoolExecutor(4, multiprocessing.get_context("spawn")) as pool:
        runs = Runs(pool, seconds)
        held, slowdown = await measure_idle(runs, 200 if quick else 5000, rounds)
        return {
            "roundtrip_overhead_ms": await measure_overhead(runs),
            "vs_openpi_server": await measure_timed(runs, rounds),
            "vs_openpi_server_shipped": await measure_shipped(runs, rounds),
            "replies_lost": await measure_kills(runs, 100 if quick else 2000),
            "reloads_mixed": await measure_reloads(20 if quick else 200),
            "idle_connections": held,
            "idle_slowdown": slowdown,
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table and one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of each load")
    figures = uvloop.run(_measure(parser.parse_args(arguments)))
    print_table("a policy server", figures)
    print_json_line(figures)


if __name__ == "__main__":
    main()
