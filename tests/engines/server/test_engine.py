"""Replies from servers elsewhere are those of the learner's weights, whatever happens to a server."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch
from model_servers import FakeSglang, FakeVllm, Server, same_weights, serving
from small_policies import completing_policy, moved, oft_policy
from tiny_vision import tiny_vision

from vla_rl.engines import DeviceLane, EngineConfig
from vla_rl.engines.server import ModelServerConfig, ServerChatEngine
from vla_rl.envs.text import TextPoolConfig
from vla_rl.errors import ActorDied, CheckpointError, ConfigError
from vla_rl.models.language import CausalLanguageModel
from vla_rl.models.vllm import serve
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes.grpo_text import ARITHMETIC_BASE, GrpoTextConfig, training_starts
from vla_rl.reporting import read_metrics
from vla_rl.rollout import SchedulerConfig, chat_agent
from vla_rl.run.train import train
from vla_rl.testing import ChatEngineContract
from vla_rl.types import Completion, Message, RegexFormat, ReplyOptions, Sampling

ASKED = (Message(role="user", content="what is 3 plus 4"),)

MAX_REPLY = 12

KINDS = {"vllm": FakeVllm, "sglang": FakeSglang}


class House:
    """Servers, the engine over them, and the policy whose weights they were given last."""

    def __init__(self, engine: ServerChatEngine, lane: DeviceLane, servers: list[Server]) -> None:
        self.engine, self.lane, self.servers = engine, lane, servers

    async def publish(self, policy: CausalLanguageModel, version: int) -> None:
        await self.lane.run(self.engine.apply_weights, policy.network, version)

    async def say(self, seed: int = 0, **sampling: Any) -> Completion:
        return await self.engine.generate(ASKED, sampling=Sampling(seed=seed, **sampling))


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        yield stack


async def opened(
    stack: AsyncExitStack, *servers: Server, policy: CausalLanguageModel, **settings: Any
) -> House:
    for server in servers:
        await stack.enter_async_context(serving(server))
    settings.setdefault("api", "vllm" if isinstance(servers[0], FakeVllm) else "sglang")
    settings.setdefault("health_every_s", 3600.0)
    config = ModelServerConfig(urls=tuple(server.url for server in servers), **settings)
    lane = await stack.enter_async_context(DeviceLane(1))
    engine = ServerChatEngine(
        serve(policy), lane, EngineConfig(kind="server", max_reply=MAX_REPLY, server=config)
    )
    return House(await stack.enter_async_context(engine), lane, list(servers))


def gap(policy: CausalLanguageModel, completion: Completion, begin: int, end: int) -> float:
    """Largest difference from the learner's log-probs of tokens `begin` to `end`."""
    batch = policy.prepare([{"prompt_tokens": completion.prompt_tokens, "grammars": ()}])
    with torch.inference_mode():
        log_probs, _ = policy.log_probs(
            batch, torch.from_numpy(completion.tokens)[None], torch.tensor([0.8])
        )
    return float((log_probs[0] - torch.from_numpy(completion.log_probs)).abs()[begin:end].max())


@pytest.mark.parametrize("api", KINDS)
async def test_a_reply_has_the_learners_log_probs_and_the_version_of_its_weights(
    api: str, stack: AsyncExitStack
) -> None:
    policy, other = completing_policy(0), completing_policy(7)
    house = await opened(stack, KINDS[api](other), policy=policy)
    assert same_weights(house.servers[0].policy, policy)
    for version, current in ((0, policy), (1, moved(policy, 1))):
        if version:
            await house.publish(current, version)
        completion = await house.say(seed=3, temperature=0.8)
        length = len(completion.tokens)
        assert completion.weight_versions.tolist() == [version] * length
        assert gap(current, completion, 0, length) < 1e-5
        ended = completion.tokens[-1] in policy.stop_tokens
        assert completion.finish_reason == ("stop" if ended else "length")
        assert completion.message == policy.parse(policy.decode(completion.tokens))
    assert house.engine.weight_version == 1
    assert house.engine.metrics()["engine/num_ready"] == 1.0


@pytest.mark.parametrize("api", KINDS)
async def test_the_likeliest_tokens_are_reported(api: str, stack: AsyncExitStack) -> None:
    policy = completing_policy()
    house = await opened(stack, KINDS[api](policy), policy=policy)
    completion = await house.engine.generate(
        ASKED, sampling=Sampling(greedy=True), options=ReplyOptions(top_log_probs=2)
    )
    assert completion.report is not None
    for report, log_prob in zip(completion.report, completion.log_probs, strict=True):
        assert len(report.alternatives) == 2
        assert report.alternatives[0] == (report.text, pytest.approx(float(log_prob), abs=1e-6))


async def test_requests_go_to_the_least_loaded_server(stack: AsyncExitStack) -> None:
    policy = completing_policy()
    house = await opened(stack, FakeVllm(policy), FakeVllm(policy), policy=policy)
    await asyncio.gather(*(house.say(seed) for seed in range(8)))
    probes = 4
    assert [server.asked - probes for server in house.servers] == [4, 4]


async def test_a_running_reply_ends_with_the_old_weights_before_the_new_ones_are_loaded(
    stack: AsyncExitStack,
) -> None:
    policy, house, gate, began = await _waiting(stack, FakeVllm)
    newer = moved(policy, 1)
    running = asyncio.create_task(house.say(temperature=0.8))
    await began.wait()
    publishing = asyncio.create_task(house.publish(newer, 1))
    await until(lambda: not house.engine.takes_requests)
    late = asyncio.create_task(house.say(temperature=0.8))
    gate.set()
    await publishing
    completion = await running
    assert set(completion.weight_versions.tolist()) == {0}
    assert gap(policy, completion, 0, len(completion.tokens)) < 1e-5
    assert set((await late).weight_versions.tolist()) == {1}


async def test_an_interrupted_reply_goes_on_with_new_weights_and_each_token_names_its_own(
    stack: AsyncExitStack,
) -> None:
    policy, house, gate, began = await _waiting(stack, FakeSglang, update_mode="interrupt")
    newer = moved(policy, 1)
    running = asyncio.create_task(house.say(seed=5, temperature=0.8))
    await began.wait()
    publishing = asyncio.create_task(house.publish(newer, 1))
    await until(lambda: house.servers[0].is_paused)
    gate.set()
    await publishing
    completion = await running
    versions = completion.weight_versions
    (changed,) = np.flatnonzero(np.diff(versions))
    assert versions[0] == 0
    assert versions[-1] == 1
    assert gap(policy, completion, 0, changed + 1) < 1e-5
    assert gap(newer, completion, changed + 1, len(versions)) < 1e-5
    assert gap(policy, completion, changed + 1, len(versions)) > 1e-4


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def _waiting(
    stack: AsyncExitStack, kind: type[Server], **settings: Any
) -> tuple[CausalLanguageModel, House, asyncio.Event, asyncio.Event]:
    """An engine whose server waits for `gate` after its first token."""
    policy, gate, began = completing_policy(), asyncio.Event(), asyncio.Event()

    async def between_tokens() -> None:
        began.set()
        await gate.wait()

    server = kind(policy)
    server.between_tokens = between_tokens
    return policy, await opened(stack, server, policy=policy, **settings), gate, began


@pytest.mark.parametrize("api", KINDS)
async def test_a_lost_servers_request_goes_elsewhere_and_it_comes_back_with_the_newest_weights(
    api: str, stack: AsyncExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    policy = completing_policy()
    house = await opened(
        stack, KINDS[api](policy), KINDS[api](policy), policy=policy, health_every_s=0.05
    )
    lost, other = house.servers
    lost.is_broken = True
    completions = await asyncio.gather(*(house.say(seed) for seed in range(4)))
    assert len(completions) == 4
    assert "its requests go to other servers" in caplog.text
    newer = moved(policy, 1)
    await house.publish(newer, 1)
    assert not same_weights(lost.policy, newer)
    assert same_weights(other.policy, newer)
    lost.is_broken = False
    await until(lambda: house.engine.metrics()["engine/num_ready"] == 2.0)
    assert same_weights(lost.policy, newer)
    assert "answers again, with weights 1" in caplog.text


async def test_a_reply_that_no_server_can_give_is_an_error_with_the_last_cause(
    stack: AsyncExitStack,
) -> None:
    policy = completing_policy()
    house = await opened(stack, FakeVllm(policy), policy=policy, request_timeout_s=0.3, attempts=2)
    house.servers[0].is_broken = True
    with pytest.raises(ActorDied, match=r"/v1/completions: status 500: .*out of memory"):
        await house.say()


@pytest.mark.parametrize("api", KINDS)
async def test_weights_that_no_server_takes_are_an_error(api: str, stack: AsyncExitStack) -> None:
    policy = completing_policy()
    house = await opened(stack, KINDS[api](policy), policy=policy)
    house.servers[0].refuses_weights = True
    with pytest.raises(CheckpointError, match=r"no model server took .* 1: .*no such tensor"):
        await house.publish(moved(policy, 1), 1)


@pytest.mark.parametrize("api", KINDS)
async def test_a_server_that_says_it_loaded_weights_and_did_not_is_found_out(
    api: str, stack: AsyncExitStack
) -> None:
    policy = completing_policy()
    house = await opened(stack, KINDS[api](policy), policy=policy)
    house.servers[0].load = lambda _folder: None  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match=r"loaded weights 1, but its log-probs differ"):
        await house.publish(completing_policy(5), 1)


async def test_a_server_whose_log_probs_ignore_the_temperature_is_found_out(
    stack: AsyncExitStack,
) -> None:
    policy = completing_policy()
    with torch.no_grad():  # as sure of its tokens as a trained policy
        policy.network.lm_head.weight.mul_(6)
    server = FakeVllm(policy)
    server.reports_at = 1.0
    with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
        await opened(stack, server, policy=policy)


async def test_only_the_newest_weights_are_kept_and_nothing_is_left_in_the_end(
    tmp_path: Path,
) -> None:
    policy = completing_policy()
    async with AsyncExitStack() as stack:
        house = await opened(
            stack, FakeVllm(policy), policy=policy, weights_folder=str(tmp_path / "weights")
        )
        for version in (1, 2):
            await house.publish(moved(policy, version), version)
        (folder,) = (tmp_path / "weights").iterdir()
        assert [entry.name for entry in folder.iterdir()] == ["version-2-3"]
    assert list((tmp_path / "weights").iterdir()) == []


async def test_a_request_that_a_server_does_not_accept_is_the_callers_error(
    stack: AsyncExitStack,
) -> None:
    policy = completing_policy()
    house = await opened(stack, FakeVllm(policy), policy=policy)
    with pytest.raises(ValueError, match=r"refused a request \(400\): .*prompt is too long"):
        await house.engine.generate(np.full(220, 5))
    assert (await house.say()).weight_versions[0] == 0


async def test_sglangs_grammars_are_not_ours_and_refused(stack: AsyncExitStack) -> None:
    policy = completing_policy()
    house = await opened(stack, FakeSglang(policy), policy=policy)
    with pytest.raises(ValueError, match=r"not supported with engine\.server\.api 'sglang'"):
        await house.engine.generate(
            ASKED, options=ReplyOptions(format=RegexFormat(pattern="[0-9]"))
        )


async def test_a_server_of_the_other_kind_is_named_at_the_start(stack: AsyncExitStack) -> None:
    policy = completing_policy()
    with pytest.raises(ConfigError, match=r"has no /get_model_info; .* interface 'sglang'"):
        await opened(stack, FakeVllm(policy), policy=policy, api="sglang")


async def test_a_vllm_server_that_cannot_load_weights_is_told_how_to_start(
    stack: AsyncExitStack,
) -> None:
    server = FakeVllm(completing_policy())
    server.has_dev_routes = False
    with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1"):
        await opened(stack, server, policy=completing_policy())


async def test_a_server_that_does_not_run_is_named_at_the_start(stack: AsyncExitStack) -> None:
    server = FakeVllm(completing_policy())
    async with serving(server):
        url = server.url
    lane = await stack.enter_async_context(DeviceLane(1))
    config = EngineConfig(kind="server", server=ModelServerConfig(urls=(url,)))
    with pytest.raises(ConfigError, match=rf"{url} is lost: /v1/models.*; start it before the run"):
        await stack.enter_async_context(ServerChatEngine(serve(completing_policy()), lane, config))


async def test_settings_that_cannot_work_are_refused(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = await stack.enter_async_context(DeviceLane(1))
    good = EngineConfig(kind="server", server=ModelServerConfig(urls=("http://127.0.0.1:9",)))

    def changed(**fields: Any) -> EngineConfig:
        return msgspec.structs.replace(good, server=ModelServerConfig(**fields))

    policy: Any = oft_policy()
    with pytest.raises(ConfigError, match=r"serves language policies; .* action chunks"):
        ServerChatEngine(serve(policy), lane, good)
    with pytest.raises(ConfigError, match=r"no policy that reads images.*engine 'torch' or 'vllm'"):
        ServerChatEngine(serve(tiny_vision()), lane, good)
    with pytest.raises(ConfigError, match=r"urls .* expected at least one address"):
        ServerChatEngine(serve(completing_policy()), lane, changed())
    for fields, wanted in (
        ({"urls": ("10.0.0.7:8000",)}, "addresses such as http"),
        ({"urls": ("http://a", "http://a")}, "different addresses"),
        ({"urls": ("http://a",), "update_mode": "interrupt"}, "a vLLM server cannot interrupt"),
    ):
        with pytest.raises(ConfigError, match=wanted):
            ModelServerConfig(**fields)  # type: ignore[arg-type]
    monkeypatch.delenv("SERVERS_KEY", raising=False)
    keyed = changed(urls=("http://127.0.0.1:9",), key_variable="SERVERS_KEY")
    with pytest.raises(ConfigError, match=r"environment variable SERVERS_KEY .* is not set"):
        await stack.enter_async_context(ServerChatEngine(serve(completing_policy()), lane, keyed))


async def test_the_servers_key_comes_from_the_environment(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, server = completing_policy(), FakeVllm(completing_policy())
    server.key = "secret"
    monkeypatch.setenv("SERVERS_KEY", "another")
    with pytest.raises(ConfigError, match=r"refused our key \(status 401\)"):
        await opened(stack, server, policy=policy, key_variable="SERVERS_KEY")
    monkeypatch.setenv("SERVERS_KEY", "secret")
    house = await opened(stack, server, policy=policy, key_variable="SERVERS_KEY")
    assert (await house.say()).weight_versions[0] == 0


async def test_the_form_of_a_reply_reaches_a_vllm_server_as_a_grammar(
    stack: AsyncExitStack,
) -> None:
    policy = completing_policy()
    house = await opened(stack, FakeVllm(policy), policy=policy)
    completion = await house.engine.generate(
        ASKED, options=ReplyOptions(format=RegexFormat(pattern="[0-9]"))
    )
    assert completion.grammar is not None
    asked = house.servers[0].bodies[-1]
    assert asked["structured_outputs"] == {"grammar": completion.grammar}


async def test_a_server_that_does_not_answer_in_time_is_lost(stack: AsyncExitStack) -> None:
    _, house, _, _ = await _waiting(stack, FakeVllm, request_timeout_s=0.3, attempts=1)
    with pytest.raises(ActorDied, match=r"/v1/completions was not answered within 0\.3 s"):
        await house.say()


async def test_a_run_learns_from_the_replies_of_a_server(tmp_path: Path) -> None:
    policy = CausalLanguageModel.load(ARITHMETIC_BASE)
    async with serving(FakeSglang(CausalLanguageModel.load(ARITHMETIC_BASE))) as server:
        plain = GrpoTextConfig(
            run=RunConfig(name="remote", root=str(tmp_path), updates=2, device="cpu"),
            group_size=4,
            scheduler=SchedulerConfig(groups_per_update=4, max_staleness=1),
            num_validation=0,
            text=TextPoolConfig(num_envs=8),
        )
        servers = ModelServerConfig(urls=(server.url,), api="sglang", update_mode="interrupt")
        engine = msgspec.structs.replace(plain.engine, kind="server", server=servers)
        config = msgspec.structs.replace(plain, engine=engine)
        outcome = await train(
            config,
            training_starts(config),
            policy,
            agent=functools.partial(chat_agent, limits=config.chat),
        )
    assert len(server.loaded) == 3  # before the first update, and after each
    assert same_weights(server.policy, policy)
    assert not same_weights(server.policy, CausalLanguageModel.load(ARITHMETIC_BASE))
    lines = read_metrics(outcome.run.path / "metrics.jsonl")
    gap = "update/log_prob_gap_max"
    gaps = [line[gap] for line in lines if gap in line]  # not if no group of an update differs
    assert gaps
    assert max(gaps) < 1e-4
    assert lines[-1]["engine/num_ready"] == 1.0


class OfServers(ChatEngineContract):
    """What both kinds of server share."""

    server: ClassVar[type[Server]]
    api: ClassVar[Any]

    def make_policy(self) -> CausalLanguageModel:
        return completing_policy()

    @asynccontextmanager
    async def open_engine(self) -> AsyncIterator[ServerChatEngine]:
        server = self.server(completing_policy(7))  # the engine gives it the weights
        async with serving(server), DeviceLane(1) as lane:
            settings = ModelServerConfig(urls=(server.url,), api=self.api, health_every_s=3600.0)
            config = EngineConfig(kind="server", max_reply=self.max_reply, server=settings)
            async with ServerChatEngine(serve(self.make_policy()), lane, config) as engine:
                yield engine


class TestVllmServer(OfServers):
    server, api = FakeVllm, "vllm"


class TestSglangServer(OfServers):
    server, api = FakeSglang, "sglang"
