"""Estimates of an update on one device: memory against torch's tracker, seconds by hand."""

import asyncio
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import pytest
import torch
from tiny_vision import tiny_vision
from torch import nn

from benchmarks.gpu.estimates import estimate_figures, has_least_seconds, has_utilization
from benchmarks.gpu.tracked_memory import (
    Compared,
    compare,
    compare_conversations,
    estimate_conversations,
    fake_language_model,
    fake_policy,
    meta_network,
    public_kept,
    public_shape,
    rows_of,
)
from vla_rl.errors import ConfigError
from vla_rl.learner import LearnerConfig
from vla_rl.learner.estimates.device import (
    STATE_PASS_BYTES,
    CudaOverheads,
    Workload,
    estimate_gpu,
    roofline,
    update_flops,
)
from vla_rl.learner.estimates.rank_memory import PolicySize, measure_network
from vla_rl.learner.estimates.traced_pass import (
    Kept,
    TracedPass,
    fake_tensors,
    trace_kept,
    trace_pass,
)
from vla_rl.learner.flops import DevicePeak
from vla_rl.models.example_inputs import ConversationSizes, example_row, trace_kept_conversations
from vla_rl.models.mlp import MlpConfig, MlpPolicy
from vla_rl.models.openvla_oft import OpenVlaOft
from vla_rl.models.prismatic.config import LoraConfig, OpenVlaOftConfig, tiny

GB = 10**9
SHALLOW = public_shape(2, tower_layers=2)


@cache
def compared(rank: int | None, *, recomputes: bool) -> Compared:
    lora = None if rank is None else LoraConfig(rank=rank)
    return compare(msgspec.structs.replace(SHALLOW, lora=lora), 8, recomputes=recomputes)


@pytest.mark.parametrize(
    ("rank", "recomputes"),
    [
        (32, True),
        # the language policies below are trained whole, and keep their activations
        pytest.param(None, False, marks=pytest.mark.proof),
        pytest.param(None, True, marks=pytest.mark.proof),
        pytest.param(32, False, marks=pytest.mark.proof),
    ],
)
def test_the_estimate_is_within_5_percent_of_torchs_tracker(
    rank: int | None, recomputes: bool
) -> None:
    assert abs(compared(rank, recomputes=recomputes).error) <= 0.05


# the test below has the part that the depth decides, with a few layers
@pytest.mark.proof
def test_the_estimate_of_the_public_7b_is_within_5_percent_of_torchs_tracker() -> None:
    found = compare(public_shape(), 1)
    assert abs(found.error) <= 0.05
    assert found.tracked > 130 * GB
    assert found.traced.kept == kept_by_7b(None)


def test_what_a_deep_7b_keeps_is_known_from_a_shallow_one() -> None:
    deep = kept_by(public_shape(4, tower_layers=5))
    assert deep == public_kept(kept_by_shallow_7b(None), 4, running_layers=(4, 4, 4))


@pytest.mark.parametrize(
    ("vocab_size", "conversations"),
    [
        pytest.param(
            32_000,
            ConversationSizes(prompt=100, scored=100, completion_tokens=100, rows=2),
            marks=pytest.mark.proof,
        ),
        # more logits than one chunk has
        (152_000, ConversationSizes(prompt=100, scored=1900, completion_tokens=300, rows=2)),
    ],
)
def test_the_estimate_of_a_language_policy_is_within_5_percent_of_torchs_tracker(
    vocab_size: int, conversations: ConversationSizes
) -> None:
    model = fake_language_model(
        2,
        hidden_size=1024,
        intermediate_size=4096,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=vocab_size,
        max_position_embeddings=8192,
    )
    found = compare_conversations(model, conversations)
    assert abs(found.error) <= 0.05
    each = 4 * conversations.rows * conversations.length
    # two layers of products, forward, and twice as much backward
    assert found.traced.update_flops > 2.9 * found.traced.act_flops
    assert found.estimate.terms["activations"] > 2 * 4 * 1024 * each


def test_the_estimate_of_a_policy_that_sees_is_within_5_percent_of_torchs_tracker() -> None:
    # a block of the tower for each kind of attention
    model = tiny_vision(num_layers=1, depth=2)
    shown = ConversationSizes(
        prompt=60, scored=20, completion_tokens=20, rows=2, images=((168, 140),)
    )
    found = compare_conversations(model, shown)
    assert abs(found.error) <= 0.05
    text = estimate_conversations(
        found.size, trace_kept_conversations(model, replace(shown, images=()))
    )
    assert found.estimate.terms["activations"] > 2 * text.terms["activations"]


def test_batches_are_pinned_for_a_gpu_while_a_pass_is_traced() -> None:
    # `Tensor.pin_memory` is refused where there is no GPU, and its operation where there is no memory
    with fake_tensors(tiny_vision().network):
        rows = torch.ones(3, 2)
        assert torch.ops.aten._pin_memory.default(rows) is rows


@cache
def size_of_7b(lora: LoraConfig | None) -> PolicySize:
    return measure_network(meta_network(public_shape(lora=lora)))


def kept_by(config: OpenVlaOftConfig) -> Kept:
    model = fake_policy(config)
    with fake_tensors(model.network):
        batch, tokens = rows_of(model.config, 1)
    return trace_kept(model, batch, tokens)


@cache
def kept_by_shallow_7b(lora: LoraConfig | None) -> Kept:
    return kept_by(public_shape(3, tower_layers=4, lora=lora))


def kept_by_7b(lora: LoraConfig | None) -> Kept:
    return public_kept(kept_by_shallow_7b(lora), 4)


def test_the_7b_fits_where_it_should() -> None:
    size, kept = size_of_7b(None), kept_by_7b(None)
    assert size.num_trained == 7_541_237_184
    row, many = LearnerConfig(micro_batch=1), LearnerConfig(micro_batch=16)
    full = estimate_gpu(size, row, kept, recomputes=True)
    assert full.terms["weights"] == 2 * size.num_trained
    assert full.terms["moments"] == 8 * size.num_trained
    with pytest.raises(
        ConfigError, match=r"14\.0 weights \+ 28\.1 gradients .* > 74\.5 GiB; take a smaller"
    ):
        full.require_fit(80 * GB)
    ranks = estimate_gpu(
        size, LearnerConfig(micro_batch=1, ranks=8, shard="weights"), kept, recomputes=True
    )
    ranks.require_fit(40 * GB)
    assert ranks.terms["NCCL"] > 0

    lora = LoraConfig(rank=32)
    size, kept = size_of_7b(lora), kept_by_7b(lora)
    estimate_gpu(size, row, kept, recomputes=False).require_fit(40 * GB)
    estimate_gpu(size, many, kept, recomputes=True).require_fit(40 * GB)
    estimate_gpu(size, many, kept, recomputes=False).require_fit(141 * GB)


def test_the_page_has_the_memory_of_the_arithmetic() -> None:
    page = (Path(__file__).parents[3] / "docs" / "gpu.md").read_text()
    rows = re.findall(
        r"^\| (all weights|adapters of rank 32) \| (kept|recomputed) \| (.*) \|$",
        page,
        re.MULTILINE,
    )
    assert len(rows) == 4
    for trained, activations, numbers in rows:
        lora = LoraConfig(rank=32) if trained.startswith("adapters") else None
        size, kept = size_of_7b(lora), kept_by_7b(lora)
        recomputes = activations == "recomputed"
        told = [
            estimate_gpu(size, LearnerConfig(micro_batch=num), kept, recomputes=recomputes).total
            for num in (1, 8, 32)
        ]
        assert " | ".join(f"{num_bytes / 2**30:.1f}" for num_bytes in told) == numbers


def test_what_a_network_keeps_is_that_of_a_hand_count() -> None:
    model = MlpPolicy.create(
        MlpConfig(state_size=3, action_low=(0.0,), action_high=(1.0,), num_bins=5, hidden=(64,)),
        seed=0,
    )
    row = example_row(model)
    assert row is not None
    found = trace_pass(model, row.batch, row.tokens)
    # 3 x 64 and 64 x 5 products, forward; backward twice that, without the input's own gradient
    assert found.act_flops == 2 * (3 * 64 + 64 * 5)
    assert found.update_flops == found.act_flops + 2 * (3 * 64 + 2 * 64 * 5)
    assert found.kept.inside == ()
    assert 4 * (3 + 64 + 5) <= found.kept.outside <= 4 * (3 + 64 + 5) + 200


def test_a_trace_leaves_the_policy_as_it_was() -> None:
    shape = tiny(image_size=28, cameras=("image",), proprio=None, chunk_size=2)
    first, second = (
        msgspec.structs.replace(tower, overrides={**tower.overrides, "depth": 2})
        for tower in (shape.featurizer, shape.fused_featurizer)
    )
    llm = msgspec.structs.replace(shape.llm, num_layers=2)
    shape = msgspec.structs.replace(shape, featurizer=first, fused_featurizer=second, llm=llm)
    model = OpenVlaOft.create(shape, seed=0)
    model.recompute_activations()
    before = {name: tensor.clone() for name, tensor in model.network.state_dict().items()}
    row = example_row(model)
    assert row is not None
    kept = trace_pass(model, row.batch, row.tokens).kept
    assert kept == trace_kept(model, row.batch, row.tokens)
    assert len(kept.inside) == len(kept.inputs) == 2 + 2 + 2 - 2  # towers stop before
    assert sum(kept.inputs) < sum(kept.inside)
    assert all(parameter.grad is None for parameter in model.network.parameters())
    assert not model.network._is_bidirectional, (
        "the check that a pass makes was made with no numbers"
    )
    assert all(torch.equal(before[name], now) for name, now in model.network.state_dict().items())
    assert all(not hasattr(parameter, "fake_mode") for parameter in model.network.parameters())


def test_activations_grow_with_the_micro_batch_and_shrink_with_recomputation() -> None:
    kept = Kept(inside=(100, 300), inputs=(10, 20), outside=5, largest=50)
    assert (kept.kept(recomputes=False), kept.passing(recomputes=False)) == (5 + 400, 150)
    assert (kept.kept(recomputes=True), kept.passing(recomputes=True)) == (5 + 30, 300 + 150)
    size = measure_network(nn.Linear(10, 10, bias=False))
    none = CudaOverheads(context=0, workspaces=0, fragments=0.0)
    terms = {
        rows: estimate_gpu(
            size, LearnerConfig(micro_batch=rows), kept, recomputes=True, overheads=none
        )
        for rows in (1, 8)
    }
    assert terms[8].total - terms[1].total == 7 * (5 + 30 + 300 + 150)
    assert terms[1].tensors == terms[1].total
    assert re.search(r"= 0\.0 <= 1\.0 GiB$", terms[1].inequality(2**30))


def test_the_estimates_give_the_campaign_least_seconds_and_a_utilization() -> None:
    assert has_least_seconds(compared(32, recomputes=True))
    assert asyncio.run(has_utilization())


# the test above has both figures, the first test of this file the error
@pytest.mark.proof
def test_the_campaign_has_the_figures_of_the_estimates() -> None:
    figures = estimate_figures(is_tiny=True)
    assert abs(figures["memory_estimate_error"]) <= 0.05
    assert figures["mfu_estimate_present"] == 1.0


TRACED = TracedPass(
    act_flops=100, update_flops=300, kept=Kept(inside=(), inputs=(), outside=0, largest=0)
)
SIZE = PolicySize(num_trained=10, num_frozen=40, bytes_each=2)
WORK = Workload(decisions=8, epochs=2, steps=4, acting_rows=4, recomputes=False)
PEAK = DevicePeak(flops=100.0, bytes_per_s=1000.0)


def test_arithmetic_and_memory_by_hand() -> None:
    found = roofline(TRACED, SIZE, WORK, PEAK)
    assert found.acting_s == pytest.approx(8.0)  # 8 x 100 / 100; two batches read 200 bytes
    assert found.acting_binds == "compute"
    assert found.learning_s == pytest.approx(48.0)  # 8 x 2 x 300 / 100
    assert found.optimizer_s == pytest.approx(4 * STATE_PASS_BYTES * 10 / 1000)
    assert found.seconds == pytest.approx(8.0 + 48.0 + 1.36)
    assert found.binds == "compute"


def test_recomputing_adds_a_pass_that_acts() -> None:
    assert update_flops(TRACED, recomputes=True) == 400
    found = roofline(TRACED, SIZE, replace(WORK, recomputes=True), PEAK)
    assert found.learning_s == pytest.approx(64.0)


def test_small_batches_read_the_weights_more_often_than_they_compute() -> None:
    # 8 batches of one row, 20 tokens each, 100 bytes of weights: 16 s
    found = roofline(TRACED, SIZE, replace(WORK, acting_rows=1, passes=20), PEAK)
    assert (found.acting_s, found.acting_binds) == (pytest.approx(16.0), "memory bandwidth")


def test_ranks_share_learning_and_not_acting() -> None:
    found = roofline(TRACED, SIZE, replace(WORK, ranks=4), PEAK)
    assert (found.acting_s, found.learning_s) == (pytest.approx(8.0), pytest.approx(12.0))
    assert found.optimizer_s == pytest.approx(0.34)


def test_simulators_bind_where_they_are_slower_than_the_device() -> None:
    work = replace(WORK, simulator_s=40.0, cores=4)  # 8 x 40 / 4 = 80 s
    found = roofline(TRACED, SIZE, work, PEAK)
    assert (found.simulators_s, found.seconds, found.binds) == (80.0, 80.0, "simulators")
    apart = roofline(TRACED, SIZE, replace(work, overlaps=False), PEAK)
    assert apart.seconds == pytest.approx(80.0 + 57.36)


def test_a_device_of_unknown_bandwidth_is_taken_by_its_arithmetic_alone() -> None:
    found = roofline(TRACED, SIZE, replace(WORK, passes=1000), DevicePeak(flops=100.0))
    assert (found.optimizer_s, found.acting_binds) == (0.0, "compute")
