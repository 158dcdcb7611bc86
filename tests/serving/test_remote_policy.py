"""Episodes are run with a policy that somebody else serves, whatever their server does."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest
from rollout_fakes import LatencyPool
from websockets.asyncio.server import ServerConnection, serve

from vla_rl.errors import ConfigError
from vla_rl.evaluation import run_each
from vla_rl.rollout import EpisodeLost
from vla_rl.rollout.experts import PolicyExpert, ask_expert
from vla_rl.serving.openpi_messages import decode_message, encode_message
from vla_rl.serving.remote_config import RemotePolicyConfig
from vla_rl.serving.remote_policy import RemotePolicyServer
from vla_rl.types import EnvSpec, EpisodeSpec, Sampling, Trajectory

Answer = Callable[[ServerConnection, int], Awaitable[bytes | str]]
"""Answers the observation of this number, counted over all connections."""

GOOD = encode_message({"actions": np.ones((4, 1), np.float64)})
OWN_NAMES = RemotePolicyConfig(map=("state=state",), answer_timeout_s=30.0, connect_timeout_s=30.0)
HURRIED = msgspec.structs.replace(OWN_NAMES, answer_timeout_s=0.5, connect_timeout_s=0.5)
"""For what has to end by its deadline; elsewhere a machine that is busy for half a second would lose an answer."""


@asynccontextmanager
async def openpi_server(answer: Answer) -> AsyncIterator[str]:
    """A server as others write them: metadata, then one answer after the other. Yields its address."""
    num_asked = 0

    async def handle(connection: ServerConnection) -> None:
        nonlocal num_asked
        await connection.send(encode_message({"policy": "theirs"}))
        async for frame in connection:
            assert isinstance(frame, bytes)
            assert decode_message(frame)["state"].shape == (1,)
            num_asked += 1
            await connection.send(await answer(connection, num_asked))

    async with serve(handle, "127.0.0.1", 0, compression=None) as server:
        yield f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"


async def answer_well(connection: ServerConnection, number: int) -> bytes | str:
    return GOOD


async def run_episodes(
    address: str, count: int = 4, config: RemotePolicyConfig = OWN_NAMES
) -> list[Trajectory]:
    server = RemotePolicyServer(address, config, action_size=1)
    episodes = [
        EpisodeSpec(
            episode_id=number, group_id=0, member=0, env=EnvSpec(id="none"), task="count", seed=number, policy_seed=0
        )
        for number in range(count)
    ]  # fmt: skip
    ended: list[Trajectory] = []

    async def done(trajectory: Trajectory) -> None:
        ended.append(trajectory)

    pool = LatencyPool(2)
    await run_each(pool, server, server.run_agent, episodes, done)
    return ended


async def test_a_servers_chunks_are_run_and_recorded() -> None:
    async with openpi_server(answer_well) as address:
        trajectories = await run_episodes(address)
    assert sorted(each.episode.episode_id for each in trajectories) == [0, 1, 2, 3]
    chunk = trajectories[0].steps[0].chunk
    np.testing.assert_array_equal(chunk.actions, np.ones((4, 1)))
    assert chunk.actions.dtype == np.float32


async def test_replan_runs_the_first_rows_of_a_chunk() -> None:
    config = msgspec.structs.replace(OWN_NAMES, replan=3)
    async with openpi_server(answer_well) as address:
        trajectories = await run_episodes(address, 1, config)
    assert {step.chunk.actions.shape for step in trajectories[0].steps} == {(3, 1)}


async def test_a_served_policy_is_an_expert_of_another_one() -> None:
    async with openpi_server(answer_well) as address:
        server = RemotePolicyServer(address, OWN_NAMES, action_size=1)
        answer = await ask_expert(PolicyExpert(server), {"state": np.zeros(1, np.float32)}, 1, 5.0)
    np.testing.assert_array_equal(answer, np.ones((4, 1)))


async def answer_late(connection: ServerConnection, number: int) -> bytes | str:
    await asyncio.sleep(1.0)
    return GOOD


async def die(connection: ServerConnection, number: int) -> bytes | str:
    connection.transport.abort()
    return GOOD


def answering(answer: bytes | str) -> Answer:
    async def say(connection: ServerConnection, number: int) -> bytes | str:
        return answer

    return say


FAULTS: dict[str, tuple[Answer, str]] = {
    "late": (answer_late, r"no answer within 0\.5 s"),
    "dead": (die, "the connection ended"),
    "wrong width": (
        answering(encode_message({"actions": np.ones((4, 2))})),
        r"actions are \[4, 2\], expected \[H, 1\]",
    ),
    "no rows": (answering(encode_message({"actions": np.ones((0, 1))})), r"actions are \[0, 1\]"),
    "NaN": (answering(encode_message({"actions": np.full((4, 1), np.nan)})), "NaN or infinity"),
    "no actions": (answering(encode_message({"action": [1.0]})), "has the entries 'action'"),
    "no msgpack": (answering(b"\xc1"), "no msgpack"),
    "an error": (answering("Traceback: no prompt"), "answers with an error: Traceback: no prompt"),
}


def config_for(fault: str) -> RemotePolicyConfig:
    return HURRIED if fault == "late" else OWN_NAMES


@pytest.mark.parametrize("fault", FAULTS)
async def test_an_episode_whose_answer_is_bad_is_run_again(fault: str) -> None:
    bad, _ = FAULTS[fault]

    async def answer(connection: ServerConnection, number: int) -> bytes | str:
        return await (bad if number == 3 else answer_well)(connection, number)

    async with openpi_server(answer) as address:
        trajectories = await run_episodes(address, config=config_for(fault))
    assert sorted(each.episode.episode_id for each in trajectories) == [0, 1, 2, 3]
    assert sum(each.episode.attempt for each in trajectories) == 1


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_server_that_always_answers_badly_is_named_with_what_was_expected(
    fault: str,
) -> None:
    bad, problem = FAULTS[fault]
    async with openpi_server(bad) as address:
        with pytest.raises(EpisodeLost, match=problem) as lost:
            await run_episodes(address, 1, config_for(fault))
    assert f"policy server {address}" in str(lost.value)


async def test_a_server_that_is_not_there_is_named() -> None:
    server = RemotePolicyServer("ws://127.0.0.1:9", HURRIED, action_size=1)
    with pytest.raises(ConfigError, match=r"policy server ws://127\.0\.0\.1:9: cannot be reached"):
        await server.read_metadata()


async def test_weights_that_change_between_two_answers_end_the_evaluation() -> None:
    async def answer(connection: ServerConnection, number: int) -> bytes | str:
        return encode_message({"actions": np.ones((4, 1)), "weight_version": number})

    async with openpi_server(answer) as address:
        with pytest.raises(ConfigError, match="from version 1 to 2 during the evaluation"):
            await run_episodes(address)


async def test_what_may_change_is_no_part_of_a_servers_fingerprint() -> None:
    async with openpi_server(answer_well) as address:
        server = RemotePolicyServer(address, OWN_NAMES, action_size=1)
        assert await server.read_metadata() == {"policy": "theirs"}


@asynccontextmanager
async def vla_eval_server(
    version: int = 1, seq_shift: int = 0
) -> AsyncIterator[tuple[str, list[str]]]:
    """The messages of vla-eval 0.8's predict server, with keys of text; yields what it was sent."""
    kinds: list[str] = []

    async def handle(connection: ServerConnection) -> None:
        async for frame in connection:
            message = msgspec.msgpack.decode(frame)  # type: ignore[arg-type]
            kinds.append(message["type"])
            payload: dict[str, object] = {}
            if message["type"] == "hello":
                payload = {"harness_version": "0.8.0", "protocol_version": version}
            elif message["type"] == "observation":
                state = message["payload"]["states"]
                assert (state["__ndarray__"], state["dtype"], state["shape"]) == (True, "<f4", [1])
                data = np.ones(1, np.float32).tobytes()
                payload = {
                    "actions": {"__ndarray__": True, "data": data, "dtype": "<f4", "shape": [1]}
                }
            else:
                continue
            kind = "hello" if message["type"] == "hello" else "action"
            answer = {
                "type": kind,
                "payload": payload,
                "seq": message["seq"] + seq_shift,
                "timestamp": 0.0,
            }
            await connection.send(msgspec.msgpack.encode(answer))

    async with serve(handle, "127.0.0.1", 0) as server:
        yield f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}", kinds


OBSERVATION = {
    "image": np.zeros((2, 2, 3), np.uint8), "state": np.zeros(1, np.float32), "instruction": "open it"
}  # fmt: skip
VLA_EVAL = msgspec.structs.replace(OWN_NAMES, protocol="vla-eval")


async def test_a_predict_server_of_vla_eval_is_greeted_and_told_where_an_episode_begins() -> None:
    async with vla_eval_server() as (address, kinds):
        server = RemotePolicyServer(address, VLA_EVAL, action_size=1)
        chunk = await server.act(OBSERVATION, Sampling())
    assert kinds == ["hello", "episode_start", "observation"]
    np.testing.assert_array_equal(chunk.actions, [[1.0]])


async def test_another_version_of_vla_evals_protocol_is_refused() -> None:
    async with vla_eval_server(version=2) as (address, _):
        with pytest.raises(
            ConfigError, match="speaks version 2 of vla-eval's protocol, expected 1"
        ):
            await RemotePolicyServer(address, VLA_EVAL, action_size=1).read_metadata()


async def test_an_answer_to_another_message_is_none() -> None:
    async with vla_eval_server(seq_shift=-1) as (address, _):
        with pytest.raises(ConfigError, match="answers 'hello' 0"):
            await RemotePolicyServer(address, VLA_EVAL, action_size=1).read_metadata()


def test_an_entry_of_the_environment_cannot_go_under_two_names() -> None:
    with pytest.raises(ConfigError, match="which cannot be split"):
        RemotePolicyConfig(map=("droid",))


async def test_a_pair_for_an_entry_that_the_environment_does_not_show_is_refused() -> None:
    config = msgspec.structs.replace(OWN_NAMES, map=("state=state", "observation/image=imag"))
    async with openpi_server(answer_well) as address:
        with pytest.raises(ConfigError, match=r"names 'imag', which the environment does not show"):
            await RemotePolicyServer(address, config, action_size=1).act(
                {"state": np.zeros(1, np.float32)}, Sampling()
            )
