"""Arithmetic is counted as a hand formula has it, once for each shape; peaks are found by name."""

from functools import partial

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from vla_rl.engines import DeviceLane
from vla_rl.learner.flops import TERA, DevicePeak, LaneFlopCounter, find_device_peak, flop_counter

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
