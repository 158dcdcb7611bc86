"""Blocks that are compiled, recomputed or read shared keys give the same numbers; nothing else changes."""

import gc
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from made_inputs import shallow
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.exc import InvalidCxxCompiler
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from vla_rl.errors import ConfigError
from vla_rl.learner.estimates.traced_pass import trace_pass
from vla_rl.learner.flops import flop_counter
from vla_rl.models import attention, blocks
from vla_rl.models.attention import attend
from vla_rl.models.blocks import compile_blocks, require_compiler
from vla_rl.models.example_inputs import example_row
from vla_rl.models.openvla import OpenVla
from vla_rl.models.openvla_oft import OpenVlaOft, OpenVlaOftConfig
from vla_rl.models.prismatic.config import LoraConfig, LoraTargets, OpenVlaConfig
from vla_rl.types import Sampling

MakeObservation = Callable[..., dict[str, Any]]

TRUNK = "language_model.model.layers"

CPU = torch.device("cpu")


@contextmanager
def compiling_by(backend: str) -> Iterator[None]:
    """Compile by another backend than inductor, whose kernels take minutes on a CPU."""
    torch._dynamo.reset()
    with torch.compiler.set_stance("default", force_backend=backend):
        yield
    torch._dynamo.reset()


def adapted(config: OpenVlaOftConfig, targets: LoraTargets = "hidden") -> OpenVlaOft:
    return OpenVlaOft.create(config, seed=0).adapted(LoraConfig(rank=4, targets=targets), seed=1)


def act(policy: Any, observations: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    samplings = [Sampling(seed=seed, greedy=seed == 1) for seed in range(len(observations))]
    with torch.inference_mode():
        sampled = policy.sample(policy.prepare(observations), samplings)
        tokens, log_probs = sampled.tokens, sampled.log_probs
    return tokens.clone(), log_probs.clone()


def learn(
    policy: Any, observations: list[dict[str, Any]], tokens: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    policy.network.zero_grad()
    batch = policy.prepare(observations)
    log_probs, _ = policy.log_probs(batch, tokens, torch.ones(len(tokens)))
    torch.autograd.backward(log_probs.sum())
    gradients = {
        name: p.grad.clone() for name, p in policy.network.named_parameters() if p.grad is not None
    }
    return log_probs.detach(), gradients


def require_equal(
    found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]
) -> None:
    """Require equal log-probs and gradients but for the rounding of float32."""
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=0.0)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        gap = (found[1][name] - gradient).norm()
        assert gap <= 1e-5 * gradient.norm() + 1e-7, name


# the second also traces the backward passes
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.proof)])
def test_a_policy_that_recomputes_learns_as_with_uncompiled_blocks(
    backend: str, config: OpenVlaOftConfig, make_observation: MakeObservation
) -> None:
    plain = OpenVlaOft.create(config, seed=0)
    observations = [make_observation(seed, "stop" + " now" * seed) for seed in range(2)]
    tokens, _ = act(plain, observations)
    expected = learn(plain, observations, tokens)
    compiled = plain.copy()
    compiled.recompute_activations()
    compiled.compile_blocks()
    counters.clear()
    with compiling_by(backend):
        found = learn(compiled, observations, tokens)
    require_equal(found, expected)
    assert counters["stats"]["unique_graphs"] == 4  # both towers, the trunk, its last layer
    assert not counters["graph_break"]


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("recomputes", [False, True])
def test_kernels_of_inductor_have_the_numbers_of_uncompiled_blocks(
    recomputes: bool, config: OpenVlaOftConfig, make_observation: MakeObservation
) -> None:
    plain = adapted(config)
    compiled = plain.copy()
    if recomputes:
        compiled.recompute_activations()
    compiled.compile_blocks()
    for rows in (3, 1):
        observations = [make_observation(seed) for seed in range(rows)]
        expected, found = act(plain, observations), act(compiled, observations)
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=0.0)
        require_equal(learn(compiled, observations, found[0]), learn(plain, observations, found[0]))


def test_names_stay_and_a_copy_is_compiled(config: OpenVlaOftConfig) -> None:
    policy = adapted(config)
    names = list(policy.checkpoint_tensors())
    assert not policy.compiles_blocks
    policy.compile_blocks()
    assert list(policy.checkpoint_tensors()) == names
    assert policy.copy().compiles_blocks


def test_a_copy_acts_with_its_own_weights_and_is_compiled_for_one_row_and_for_several(
    config: OpenVlaOftConfig, make_observation: MakeObservation
) -> None:
    """Compiled are the layers of the trunk before its last one, with adapters at one place."""
    layers = range(config.llm.num_layers)
    plain = adapted(config, tuple(f"{TRUNK}.{layer}.self_attn.q_proj" for layer in layers))
    origin = plain.copy()
    compile_blocks(origin.network.language_model.model.layers[:-1], CPU, has_open_length=True)
    policy = origin.copy()
    with torch.no_grad():
        for parameter in origin.network.parameters():
            parameter.zero_()
    assert numbers_of_compilations(policy, plain, make_observation) == [1, 2, 2, 2, 2]


# in the suite: the test above, on one kind of block
@pytest.mark.proof
def test_one_row_and_any_other_number_of_rows_of_any_length_are_compiled_once_each(
    config: OpenVlaOftConfig, make_observation: MakeObservation
) -> None:
    plain = OpenVlaOft.create(config, seed=0)
    policy = plain.copy()
    policy.compile_blocks()
    # towers see two images of one row: only the trunk has one row and then several
    assert numbers_of_compilations(policy, plain, make_observation) == [4, 6, 6, 6, 6]


def numbers_of_compilations(
    policy: OpenVlaOft, plain: OpenVlaOft, make_observation: MakeObservation
) -> list[int]:
    """Compilations after one row and after each of several batches, in which both policies act
    alike.
    """
    numbers = []
    with compiling_by("eager"):
        counters.clear()
        for rows, words in ((1, 1), (2, 1), (3, 2), (5, 9), (8, 20)):
            seen = [make_observation(seed, "go" + " on" * words) for seed in range(rows)]
            for found, expected in zip(act(policy, seen), act(plain, seen), strict=True):
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=0.0)
            numbers.append(counters["stats"]["unique_graphs"])
    return numbers


def test_a_policy_that_keeps_keys_and_values_acts_as_before(
    config: OpenVlaOftConfig, make_observation: MakeObservation
) -> None:
    shared = {
        name: getattr(config, name)
        for name in OpenVlaConfig.__struct_fields__
        if hasattr(config, name)
    }
    policy = OpenVla.create(OpenVlaConfig(**{**shared, "cameras": ("image",)}), seed=0)
    observations = [make_observation(seed) for seed in range(2)]
    expected = act(policy, observations)
    policy.compile_blocks()
    counters.clear()
    with compiling_by("eager"):
        found = act(policy, observations)
    assert counters["stats"]["unique_graphs"] == 2  # the towers
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=0.0)


def test_estimates_and_counts_are_those_of_uncompiled_blocks(
    config: OpenVlaOftConfig, make_observation: MakeObservation
) -> None:
    policy = OpenVlaOft.create(shallow(config), seed=0)
    row = example_row(policy)
    assert row is not None
    expected = trace_pass(policy, row.batch, row.tokens)
    act(policy, [make_observation(0)])  # a policy checks itself at its first pass
    with flop_counter() as counter:
        tokens, _ = act(policy, [make_observation(0)] * 2)
        learn(policy, [make_observation(0)] * 2, tokens)
    policy.compile_blocks()
    counters.clear()
    assert trace_pass(policy, row.batch, row.tokens) == expected
    with flop_counter() as compiled_counter:
        learn(policy, [make_observation(0)] * 2, act(policy, [make_observation(0)] * 2)[0])
    assert compiled_counter.get_total_flops() == counter.get_total_flops()
    assert not counters["stats"]


def test_compiled_blocks_are_freed_with_their_last_name(config: OpenVlaOftConfig) -> None:
    policy = OpenVlaOft.create(config, seed=0)
    policy.compile_blocks()
    block = weakref.ref(policy.network.language_model.model.layers[0])
    gc.collect()
    gc.disable()
    try:
        layers = policy.network.language_model.model.layers
        layers[0] = nn.Identity()
        assert block() is None
    finally:
        gc.enable()


def test_without_a_compiler_it_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", no_compiler)
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler runs here, .* --compile-blocks out"):
        compile_blocks([nn.Identity()], CPU, has_open_length=False)


def test_a_gpu_without_triton_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    with pytest.raises(ConfigError, match="triton is missing or does not support this GPU"):
        require_compiler(torch.device("cuda"))
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    monkeypatch.setattr(blocks.shutil, "which", lambda _: None)
    with pytest.raises(ConfigError, match="there is no C compiler"):
        require_compiler(torch.device("cuda"))


Policy = OpenVla | OpenVlaOft


@pytest.fixture(params=["openvla", "openvla_oft", "adapters"])
def policy(request: pytest.FixtureRequest, config: OpenVlaOftConfig) -> Policy:
    config = shallow(config)
    if request.param == "openvla":
        shared = {
            name: getattr(config, name)
            for name in OpenVlaConfig.__struct_fields__
            if hasattr(config, name)
        }
        return OpenVla.create(OpenVlaConfig(**{**shared, "cameras": ("image",)}), seed=0)
    oft = OpenVlaOft.create(config, seed=0)
    return oft.adapted(LoraConfig(rank=4), seed=1) if request.param == "adapters" else oft


def gradients(policy: Policy, observation: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    """The gradients of some log-probs by name, and the bytes that were kept for them."""
    batch = policy.prepare([observation] * 4)
    with torch.no_grad():
        tokens = policy.sample(batch, [Sampling(seed=seed) for seed in range(4)]).tokens
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    policy.network.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        log_probs, _ = policy.log_probs(batch, tokens, torch.ones(4))
    torch.autograd.backward(log_probs.sum())
    found = {
        name: p.grad.clone() for name, p in policy.network.named_parameters() if p.grad is not None
    }
    return found, sum(kept.values())


def test_gradients_are_the_same_and_less_is_kept(
    policy: Policy, make_observation: MakeObservation
) -> None:
    observation = make_observation(0)
    expected, all_bytes = gradients(policy, observation)
    policy.recompute_activations()
    found, bytes_kept = gradients(policy, observation)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    parameters = sum(
        parameter.untyped_storage().nbytes() for parameter in policy.network.parameters()
    )
    assert bytes_kept < 0.5 * all_bytes, (bytes_kept, all_bytes, parameters)


def test_names_stay_and_a_copy_recomputes_with_weights_of_its_own(
    policy: Policy, make_observation: MakeObservation
) -> None:
    names = list(policy.checkpoint_tensors())
    expected, _ = gradients(policy, make_observation(0))
    policy.recompute_activations()
    assert list(policy.checkpoint_tensors()) == names
    copied = policy.copy()
    with torch.no_grad():
        for parameter in policy.network.parameters():
            parameter.zero_()
    found, _ = gradients(copied, make_observation(0))
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


ROWS, HEADS, KEY_HEADS, LENGTH, SIZE = 5, 6, 2, 40, 16


@pytest.fixture
def heads() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return one query a row, keys and values in longer slots, and a mask of rows of some lengths."""
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(ROWS, 1, HEADS, SIZE, generator=draw).transpose(1, 2)
    keys, values = (
        torch.randn(ROWS + 3, KEY_HEADS, LENGTH + 24, SIZE, generator=draw)[:ROWS, :, :LENGTH]
        for _ in range(2)
    )
    lengths = torch.tensor([1, 7, 40, 23, 2])
    mask = torch.arange(LENGTH)[None, None, None] < lengths[:, None, None, None]
    return query, keys, values, mask


def layer(num_groups: int) -> torch.nn.Module:
    module = torch.nn.Module()
    module.num_key_value_groups = num_groups  # type: ignore[assignment]
    module.config = types.SimpleNamespace(is_causal=True)  # type: ignore[assignment]
    return module.eval()


@pytest.mark.parametrize("scaling", [None, 0.3])
def test_one_query_a_row_gets_what_transformers_computes_on_repeated_keys(
    heads: tuple[Tensor, Tensor, Tensor, Tensor],
    scaling: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = layer(HEADS // KEY_HEADS)
    expected, _ = sdpa_attention_forward(module, *heads, scaling=scaling)

    def refuse(*args: object, **given: object) -> None:
        raise AssertionError("keys were repeated for each head")

    monkeypatch.setattr(attention, "sdpa_attention_forward", refuse)
    found, _ = attend(module, *heads, scaling=scaling)
    assert found.shape == expected.shape == (ROWS, 1, HEADS, SIZE)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def several_queries(query: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return query.expand(-1, -1, 3, -1), mask.expand(-1, -1, 3, -1)


def mask_of_each_head(query: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    others = mask.expand(-1, HEADS, -1, -1).clone()
    others[:, 1:, :, 1:] = False
    return query, others


@pytest.mark.parametrize("change", [several_queries, mask_of_each_head])
def test_other_queries_and_masks_are_left_to_transformers(
    heads: tuple[Tensor, Tensor, Tensor, Tensor],
    change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> None:
    query, keys, values, mask = heads
    query, mask = change(query, mask)
    module = layer(HEADS // KEY_HEADS)
    expected, _ = sdpa_attention_forward(module, query, keys, values, mask)
    found, _ = attend(module, query, keys, values, mask)
    torch.testing.assert_close(found, expected)
