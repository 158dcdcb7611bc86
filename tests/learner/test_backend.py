"""Sums, metrics, arithmetic of an update; graphs that no backward pass goes through."""

import inspect
import subprocess
import sys
import weakref
from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch
from storage_bytes import StorageBytes
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.gpu.tiny_policies import demonstrated, observation, policy_on_host, trajectories
from vla_rl.algorithms.losses import Diagnostics
from vla_rl.engines import DeviceLane
from vla_rl.learner import ImitationConfig, Learner, LearnerConfig
from vla_rl.learner.backend import LocalPolicyRank, MicroBatchSums, on_host
from vla_rl.learner.critic_backend import LocalCriticRank
from vla_rl.learner.distributed.rank import LearnerRank
from vla_rl.learner.flops import TERA, DevicePeak, LaneFlopCounter, find_device_peak, flop_counter
from vla_rl.learner.imitation import Demonstration, Imitator
from vla_rl.learner.imitation_backend import LocalImitationRank
from vla_rl.learner.learner import mean_gap, staleness_metrics, update_metrics
from vla_rl.learner.optimizer import StepReport
from vla_rl.models.language.rows import score_tokens


def number(value: float) -> Tensor:
    return torch.tensor(value)


def sums(
    *,
    tokens: list[tuple[int, float]],
    loss: float = 0.0,
    entropy: float = 0.0,
    gap: tuple[float, float, int] = (0.0, 0.0, 0),
    **extra: float,
) -> MicroBatchSums:
    """Return the sums of a micro-batch with these versions and sizes of ratios."""
    counts = {
        each.name: number(0.0) for each in fields(Diagnostics) if each.name != "extra_sums"
    } | {"num_tokens": number(float(len(tokens)))}
    return MicroBatchSums(
        loss=number(loss),
        entropy_sum=number(entropy),
        diagnostics=Diagnostics(
            **counts, extra_sums={name: number(value) for name, value in extra.items()}
        ),
        gap_sum=number(gap[0]),
        gap_max=number(gap[1]),
        num_compared=torch.tensor(gap[2]),
        tokens=torch.tensor(tokens, dtype=torch.float64).T,
        first_nonfinite=torch.tensor(-1),
    )


STEPS = [StepReport(1.0, 0.1, False), StepReport(3.0, 0.05, True)]
PARTS = [
    sums(tokens=[(4, 0.1), (5, 0.3)], loss=0.5, entropy=2.0, gap=(0.2, 0.15, 1)),
    sums(tokens=[(4, 0.3)], loss=0.25, entropy=1.0, gap=(0.4, 0.4, 1)),
]


def test_metrics_are_means_over_steps_and_tokens() -> None:
    found = update_metrics(PARTS, STEPS, weight_version=5)
    assert found["update/loss"] == pytest.approx(0.375)  # 0.75 over two steps
    assert found["update/entropy"] == pytest.approx(1.0)  # 3 over three tokens
    assert found["update/grad_norm"] == pytest.approx(2.0)
    assert found["update/lr"] == 0.05
    assert (found["update/steps"], found["update/skipped_steps"]) == (2.0, 1.0)
    assert (found["update/tokens"], found["update/trained"]) == (3.0, 1.0)


def test_ratios_are_by_the_staleness_of_their_tokens() -> None:
    found = update_metrics(PARTS, STEPS, weight_version=5)
    assert found["update/log_ratio_abs/staleness_0"] == pytest.approx(0.3)
    assert found["update/log_ratio_abs/staleness_1"] == pytest.approx(0.2)


def test_the_gap_to_the_engine_is_over_the_tokens_that_can_be_compared() -> None:
    found = update_metrics(PARTS, STEPS, weight_version=5)
    assert found["update/log_prob_gap_mean"] == pytest.approx(0.3)
    assert found["update/log_prob_gap_max"] == pytest.approx(0.4)
    stale = [sums(tokens=[(4, 0.1)])]
    assert mean_gap(stale) is None
    assert "update/log_prob_gap_mean" not in update_metrics(stale, STEPS, weight_version=5)


def test_an_update_that_had_no_signal_says_only_that() -> None:
    assert update_metrics([], [], weight_version=5) == {"update/trained": 0.0}


def test_all_sums_come_to_the_host_with_their_names() -> None:
    part = sums(tokens=[(4, 0.1)], loss=0.5, covariance=7.0)
    (found,), (other,) = on_host([part], number(3.0))
    assert float(found.loss) == 0.5
    assert float(found.diagnostics.extra_sums["covariance"]) == 7.0
    assert found.tokens.tolist() == [[4.0], [0.1]]
    assert float(other) == 3.0


def test_staleness_has_its_mean_and_its_maximum() -> None:
    assert staleness_metrics(torch.tensor([0, 1, 5])) == {
        "update/staleness_mean": 2.0,
        "update/staleness_max": 5.0,
    }


META = torch.device("meta")


def watched_policy(graphs: list[bool]) -> Any:
    """A policy that notes in its backward pass whether the graph of its entropies is still there."""
    policy = policy_on_host("mlp").copy()
    log_probs = policy.log_probs

    def watched(*args: Any) -> tuple[Tensor, Tensor]:
        found, entropies = log_probs(*args)
        entropy = weakref.ref(entropies)

        def note(gradient: Tensor) -> None:
            graphs.append(entropy() is not None)

        if found.requires_grad:
            found.register_hook(note)
        return found, entropies

    policy.log_probs = watched
    return policy


@pytest.mark.parametrize(("coef", "is_there"), [(0.0, False), (0.01, True)])
async def test_a_learner_keeps_the_graph_of_entropies_only_for_a_bonus(
    coef: float, is_there: bool
) -> None:
    graphs: list[bool] = []
    async with DeviceLane(num_threads=1) as lane:
        config = LearnerConfig(micro_batch=4, entropy_coef=coef, max_mismatch=100.0)
        await Learner(watched_policy(graphs), lane, config).update(
            trajectories("mlp"), [1.0, -1.0, 0.5]
        )
    assert graphs
    assert set(graphs) == {is_there}


async def test_imitation_keeps_no_graph_of_entropies() -> None:
    graphs: list[bool] = []
    shown = demonstrated("mlp")
    examples = [
        Demonstration(observation=observation("mlp", number), actions=shown, num_valid=len(shown))
        for number in range(3)
    ]
    async with DeviceLane(num_threads=1) as lane:
        await Imitator(watched_policy(graphs), lane, ImitationConfig(micro_batch=2)).train_step(
            examples
        )
    assert graphs
    assert not any(graphs)


def most_bytes(num: int, *, is_kept: bool) -> int:
    """Learn from log-probs of `num` positions of 152,000 tokens alone; return the peak."""
    head = nn.Linear(16, 152_000, bias=False, device=META)
    hidden = torch.randn(num, 16, device=META).requires_grad_()
    chosen = torch.zeros(num, dtype=torch.long, device=META)
    with StorageBytes() as memory:
        found, entropies = score_tokens(
            head, hidden, chosen, torch.ones(num, device=META), lambda *_: None, vocab_size=152_000
        )
        if not is_kept:
            entropies = entropies.detach()
        torch.autograd.backward(found.sum())
    return memory.most


def test_the_graph_of_entropies_would_keep_all_logits() -> None:
    logits = 4 * 8192 * 152_000
    kept, gone = most_bytes(8192, is_kept=True), most_bytes(8192, is_kept=False)
    assert kept > 2 * logits
    assert gone < 0.5 * logits


ALONE = """
import asyncio, inspect, sys
from benchmarks.gpu.tiny_policies import policy_on_host, trajectories
from vla_rl.engines import DeviceLane
from vla_rl.learner import *
from vla_rl.learner import CriticConfig, ImitationConfig, LearnerConfig

async def main():
    policy, played = policy_on_host("mlp").copy(), trajectories("mlp")
    async with DeviceLane(1) as lane:
        critic, reference = Critic(policy, lane, CriticConfig(), 0), Reference(policy, lane, 2)
        Imitator(policy, lane, ImitationConfig())
        await critic.values(played)
        await reference.log_probs(played)
        await Learner(policy, lane, LearnerConfig(max_mismatch=9.0)).update(played, [1.0, 0.5, -1.0])

asyncio.run(main())
loaded = [name for name in sys.modules if name.startswith("vla_rl.learner")]
print([name for name in loaded if "distributed" in name or "estimates" in name])
print([name for name in loaded if "torch.distributed" in inspect.getsource(sys.modules[name])])
"""
"""A process alone makes an update of everything; it prints what it loaded of ranks."""


def test_a_process_alone_is_a_rank_without_a_group() -> None:
    # torch's own AdamW imports parts of torch.distributed, so that sources are looked at, too
    command = [sys.executable, "-c", ALONE]
    found = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    assert found.stdout.splitlines() == ["[]", "[]"]


def test_ranks_of_a_group_have_the_methods_of_the_rank_of_a_process_alone() -> None:
    for kind in (LocalPolicyRank, LocalCriticRank, LocalImitationRank):
        for name, method in inspect.getmembers(kind, inspect.iscoroutinefunction):
            if name != "compute_pass" and not name.startswith("_"):
                assert inspect.signature(method) == inspect.signature(getattr(LearnerRank, name)), (
                    name
                )


ROWS, LENGTH = 2, 12
WIDTH, INNER, LAYERS, VOCABULARY = 16, 40, 3, 50


def transformer() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        use_cache=False,
    )
    network = LlamaForCausalLM(config)
    network.set_attn_implementation("sdpa")
    return network


def flops_by_hand() -> int:
    """Two operations for each product and its sum: weights, then scores and what they weigh."""
    weights = LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * INNER) + WIDTH * VOCABULARY
    attention = LAYERS * 2 * LENGTH * WIDTH
    return 2 * ROWS * LENGTH * (weights + attention)


def test_a_transformers_passes_are_counted_as_by_hand() -> None:
    network = transformer()
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    with flop_counter() as counter, torch.no_grad():
        network(tokens)
    # rotary positions add an outer product of a few numbers
    assert counter.get_total_flops() == pytest.approx(flops_by_hand(), rel=0.01)
    with flop_counter() as counter:
        network(tokens).logits.sum().backward()
    # backward computes gradients of weights and of inputs, and attention's scores once more
    scores = 2 * ROWS * LENGTH * LAYERS * LENGTH * WIDTH
    assert counter.get_total_flops() == pytest.approx(3 * flops_by_hand() + scores, rel=0.01)


async def test_the_meter_counts_each_shape_once_and_adds_it_every_time() -> None:
    counted = LaneFlopCounter()
    layer = nn.Linear(4, 8, bias=False)
    seen = []

    def act(rows: torch.Tensor) -> torch.Tensor:
        seen.append(torch.utils._python_dispatch._get_current_dispatch_mode() is not None)
        return layer(rows)

    async with DeviceLane(1) as lane:
        lane.add_observer(counted)
        for rows in (2, 3, 2):
            assert (await lane.run(act, torch.zeros(rows, 4), work="act")).shape == (rows, 8)
        await lane.run(act, torch.zeros(2, 4), work="generate")
        lane.remove_observer(counted)
        await lane.run(act, torch.zeros(2, 4), work="act")
    assert seen == [True, True, False, False, False]
    assert counted.flops() == {"act": 2 * 4 * 8 * (2 + 3 + 2)}


def test_a_job_that_is_watched_returns_and_raises_what_it_did() -> None:
    counted = LaneFlopCounter()
    assert counted.wrap_job("act", partial(max, 3, 5))() == 5
    with pytest.raises(ZeroDivisionError):
        counted.wrap_job("act", partial(divmod, 1, 0))()


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165),
    ],
)
def test_a_devices_peak_is_found_by_its_name(name: str, teraflops: int) -> None:
    peak = find_device_peak(name)
    assert peak is not None
    assert peak.flops == teraflops * 1e12


def test_an_unknown_device_has_no_peak() -> None:
    assert find_device_peak("NVIDIA L40") is None
    assert find_device_peak("AMD Instinct MI300X") is None


@pytest.mark.parametrize(
    ("name", "teraflops", "terabytes"),
    [
        ("NVIDIA H100 80GB HBM3", 989, 3.35),
        ("NVIDIA H100 PCIe", 756, 2.0),
        ("NVIDIA H200", 989, 4.8),
        ("NVIDIA GH200 480GB", 990, 4.0),
        ("NVIDIA GB200", 2500, 8.0),
        ("NVIDIA B200", 2250, 8.0),
        ("NVIDIA A100-SXM4-40GB", 312, 1.555),
        ("NVIDIA A100-SXM4-80GB", 312, 2.039),
        ("NVIDIA L4", 121, 0.3),
        ("NVIDIA L40S", 362, 0.864),
        ("NVIDIA GeForce RTX 4090", 165, 1.008),
    ],
)
def test_a_longer_name_is_not_taken_for_a_shorter_one(
    name: str, teraflops: float, terabytes: float
) -> None:
    assert find_device_peak(name) == DevicePeak(teraflops * TERA, terabytes * TERA)


@pytest.mark.parametrize("name", ["NVIDIA L40", "Tesla T4", ""])
def test_another_device_has_no_known_peak(name: str) -> None:
    assert find_device_peak(name) is None
