"""Engines share out the GPUs of their host; those of one engine share its layers."""

from pathlib import Path

import pytest
import torch
from small_policies import TEXTS, oft_policy, speaking_policy

from vla_rl.engines import DeviceLane, EngineConfig
from vla_rl.engines.vllm import VllmChatEngine, VllmConfig
from vla_rl.engines.vllm.launch import (
    assign_gpus,
    engine_arguments,
    require_shareable,
    spread_engines,
)
from vla_rl.errors import ConfigError
from vla_rl.models.vllm import serve
from vla_rl.types import Message, Sampling


def sized(size: int, num_engines: int = 1) -> EngineConfig:
    # workers wait for each other busily, which takes minutes to start on cores that are busy anyway
    vllm = VllmConfig(tensor_parallel_size=size, num_engines=num_engines, startup_s=900.0)
    return EngineConfig(kind="vllm", vllm=vllm)


def test_a_host_has_as_many_engines_as_its_gpus_hold() -> None:
    gpus = ["0", "1", "2", "3", "4"]
    assert assign_gpus(spread_engines(sized(1), gpus).vllm, gpus) == [(gpu,) for gpu in gpus]
    assert assign_gpus(spread_engines(sized(2), gpus).vllm, gpus) == [("0", "1"), ("2", "3")]
    # on a CPU, as many as were asked for
    assert assign_gpus(spread_engines(sized(1, num_engines=2), ()).vllm, ()) == [(), ()]


def test_an_engine_that_needs_more_gpus_than_there_are_is_refused_with_the_inequality() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=4 > 2 GPUs of this host"):
        spread_engines(sized(4), ["0", "1"])


def test_only_layers_that_can_be_shared_are_shared() -> None:
    speaker = serve(speaking_policy()).layout  # of two heads
    require_shareable(speaker, 2)
    with pytest.raises(ConfigError, match="does not divide the policy's num_attention_heads = 2"):
        require_shareable(speaker, 3)
    with pytest.raises(ConfigError, match="expected 1 for a policy over actions"):
        require_shareable(serve(oft_policy()).layout, 2)
    arguments = engine_arguments(
        Path("folder"), speaker, sized(2).vllm, build="cuda", dtype="bfloat16"
    )
    shared = arguments["tensor_parallel_size"], arguments["distributed_executor_backend"]
    assert shared == (2, "mp")


@pytest.mark.proof
@pytest.mark.needs_vllm
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning")
async def test_two_workers_that_share_layers_reply_as_one_does_also_after_an_update() -> None:
    prompt, sampling = [Message(role="user", content=TEXTS[0])], Sampling(greedy=True)
    found: list[list[torch.Tensor]] = []
    for size in (1, 2):
        policy = speaking_policy()
        replies = []
        async with (
            DeviceLane(1) as lane,
            VllmChatEngine(serve(policy), lane, sized(size)) as engine,
        ):
            for version in (1, 2):
                reply = await engine.generate(prompt, sampling=sampling, max_tokens=6)
                replies.append(torch.tensor(reply.log_probs))
                torch.manual_seed(0)
                with torch.no_grad():
                    for parameter in policy.network.parameters():
                        parameter.add_(0.05 * torch.randn_like(parameter))
                await lane.run(engine.adopt, policy.network, version)
        found.append(replies)
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=0.0, atol=1e-5)
    assert not torch.allclose(found[0][0], found[0][1])
