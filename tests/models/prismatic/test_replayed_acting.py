"""Acting by recordings: the same decisions, few shapes, and a call that a CUDA graph can hold."""

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import torch
from made_inputs import shallow
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vla_rl.engines.cuda_graphs import (
    MAX_RECORDINGS,
    Compute,
    CudaRecorder,
    ReplayedCall,
    ReplayedModel,
    Tensors,
    pad_num_rows,
)
from vla_rl.errors import ConfigError
from vla_rl.models.openvla import OpenVla
from vla_rl.models.openvla_oft import ContinuousOpenVlaOft, OpenVlaOft, OpenVlaOftConfig, policy
from vla_rl.models.prismatic.config import LoraConfig, OpenVlaConfig
from vla_rl.types import Sampling

MakeObservation = Callable[..., dict[str, Any]]
Policy = OpenVla | OpenVlaOft | ContinuousOpenVlaOft


# the adapters are beside such tokens, and the diffusion head reads what the L1 head does
@pytest.fixture(
    params=[
        "openvla",
        pytest.param("tokens", marks=pytest.mark.proof),
        "adapters",
        pytest.param("l1", marks=pytest.mark.proof),
        "diffusion",
    ]
)
def any_policy(
    request: pytest.FixtureRequest, config: OpenVlaOftConfig, monkeypatch: pytest.MonkeyPatch
) -> Policy:
    # each step of denoising is the same call: three instead of fifty of them
    monkeypatch.setattr(policy, "NUM_DENOISING_STEPS", 3)
    config = shallow(config)
    if request.param == "openvla":
        shared = {
            name: getattr(config, name)
            for name in OpenVlaConfig.__struct_fields__
            if hasattr(config, name)
        }
        return OpenVla.create(OpenVlaConfig(**{**shared, "cameras": ("image",)}), seed=0)
    if request.param in ("l1", "diffusion"):
        return ContinuousOpenVlaOft.create(
            msgspec.structs.replace(config, head=request.param), seed=0
        )
    oft = OpenVlaOft.create(config, seed=0)
    return oft.adapted(LoraConfig(rank=4), seed=1) if request.param == "adapters" else oft


class Recordings:
    """Recordings for a CPU: a replay computes again from, and into, the same places.

    Notes the rows of each.
    """

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, compute: Compute, inputs: Tensors) -> "Rerun":
        self.rows.append(len(inputs[0]))
        return Rerun(compute, inputs)


class Rerun:
    def __init__(self, compute: Compute, inputs: Tensors) -> None:
        self._compute, self.inputs = compute, inputs
        self._results = compute(*inputs)

    def replay(self) -> Tensors:
        for slot, result in zip(self._results, self._compute(*self.inputs), strict=True):
            slot.copy_(result)
        return self._results


def is_diffusion(policy: Policy) -> bool:
    """Then images are one call and each denoising step another."""
    return getattr(policy.config, "head", "tokens") == "diffusion"


def act(policy: Policy, observations: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    samplings = [
        Sampling(temperature=1.3, seed=seed, greedy=seed == 1) for seed in range(len(observations))
    ]
    with torch.inference_mode():
        sampled = policy.sample(policy.prepare(observations), samplings)
    return sampled.tokens, sampled.log_probs


def test_decisions_are_the_same_for_any_number_of_rows(
    any_policy: Policy, make_observation: MakeObservation
) -> None:
    observations = [make_observation(seed) for seed in range(5)]
    expected = [act(any_policy, observations[:rows]) for rows in (1, 2, 3, 5)]
    recordings = Recordings()
    any_policy.replay_acting(True, recordings)
    found = [act(any_policy, observations[:rows]) for rows in (1, 2, 3, 5)]
    for (tokens, log_probs), (wanted, wanted_log_probs) in zip(found, expected, strict=True):
        assert tokens.shape == wanted.shape
        torch.testing.assert_close(tokens, wanted, atol=1e-4, rtol=0.0)
        torch.testing.assert_close(log_probs, wanted_log_probs, atol=1e-4, rtol=0.0)
    assert set(recordings.rows) == {1, 2, 4, 8}
    any_policy.replay_acting(False)
    assert torch.equal(act(any_policy, observations[:1])[0], expected[0][0])
    assert len(recordings.rows) == (8 if is_diffusion(any_policy) else 4)


def test_prompts_of_like_length_share_a_recording(
    any_policy: Policy, make_observation: MakeObservation
) -> None:
    short, longer = (
        make_observation(0, "stop"),
        make_observation(1, "turn on the stove and put the pot on it"),
    )
    expected = [act(any_policy, rows) for rows in ([short], [longer], [short, longer])]
    recordings = Recordings()
    any_policy.replay_acting(True, recordings)
    for _ in range(2):
        found = [act(any_policy, rows) for rows in ([short], [longer], [short, longer])]
    for (tokens, _), (wanted, _) in zip(found, expected, strict=True):
        torch.testing.assert_close(tokens, wanted, atol=1e-4, rtol=0.0)
    assert len(recordings.rows) <= (6 if is_diffusion(any_policy) else 3)


def test_an_answer_is_not_overwritten_by_the_next(
    policy: OpenVlaOft, make_observation: MakeObservation
) -> None:
    replaying = policy.copy()
    replaying.replay_acting(True, Recordings())
    first = act(replaying, [make_observation(0)])
    kept = [tensor.clone() for tensor in first]
    act(replaying, [make_observation(1)])
    assert all(torch.equal(tensor, copied) for tensor, copied in zip(first, kept, strict=True))


def test_learning_is_never_replayed(policy: OpenVlaOft, make_observation: MakeObservation) -> None:
    replaying, recordings = policy.copy(), Recordings()
    replaying.replay_acting(True, recordings)
    batch = replaying.prepare([make_observation(0)])
    # with gradients: they are the caller's to switch off
    tokens = replaying.sample(batch, [Sampling(seed=0)]).tokens
    log_probs, _ = replaying.log_probs(batch, tokens, torch.ones(1))
    assert log_probs.requires_grad
    assert recordings.rows == []


def test_a_copy_replays_its_own_weights(
    policy: OpenVlaOft, make_observation: MakeObservation
) -> None:
    first, recordings = policy.copy(), Recordings()
    first.replay_acting(True, recordings)
    expected = act(first, [make_observation(0)])
    second = first.copy()
    with torch.no_grad():
        for parameter in first.network.parameters():
            parameter.zero_()
    found = act(second, [make_observation(0)])
    assert all(torch.equal(tensor, wanted) for tensor, wanted in zip(found, expected, strict=True))
    assert recordings.rows == [1, 1]


def test_a_policy_says_that_it_can_be_replayed(policy: OpenVlaOft) -> None:
    assert isinstance(policy, ReplayedModel)


class HostWaits(TorchDispatchMode):
    """Collects what a CUDA graph cannot hold: constants made on the host, and numbers read
    on it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        if any(tensor.device.type == "cpu" for tensor in tensors):
            self.found.append(str(func))
        return result


def test_what_is_recorded_waits_for_nothing_on_the_host(
    any_policy: Policy, make_observation: MakeObservation, monkeypatch: pytest.MonkeyPatch
) -> None:
    # on the meta device there are shapes only: whoever reads a number of a tensor fails
    batch = any_policy.prepare([make_observation(seed) for seed in range(3)])
    # what is looked at once, such as the direction of attention
    act(any_policy, [make_observation(0)])
    any_policy.network.to("meta")
    recorded: list[str] = []

    def watched(compute: Compute, inputs: Tensors) -> Rerun:
        with HostWaits() as waits:
            recording = Rerun(compute, tuple(rows.to("meta") for rows in inputs))
        recorded.append(compute.__name__)
        assert waits.found == []
        return recording

    # as it is while a graph is recorded
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    any_policy.replay_acting(True, watched)
    with torch.inference_mode():
        on_meta, rows = batch.to(torch.device("meta")), torch.zeros(3, device="meta")
        if isinstance(any_policy, OpenVla):
            noise = torch.zeros(3, any_policy.config.action_dim, dtype=torch.float64, device="meta")
            any_policy._acting(any_policy._generated, on_meta, rows + 1.0, rows > 0, noise)
        elif isinstance(any_policy, OpenVlaOft):
            any_policy._acting(any_policy._logits, on_meta)
        elif any_policy.config.head == "l1":
            any_policy._acting(any_policy._centre, on_meta)
        else:
            chunk = torch.zeros(
                3, any_policy.config.chunk_size, any_policy.config.action_dim, device="meta"
            )
            (seen,) = any_policy._acting(any_policy._embed_observation, on_meta)
            any_policy._acting(any_policy._noise, on_meta, chunk, rows.long(), seen)
    assert len(recorded) == (2 if is_diffusion(any_policy) else 1)


# ---- any call


def doubled(network: torch.nn.Linear) -> Compute:
    return lambda rows: (network(rows) * 2.0,)


def plus_one(rows: Tensor) -> Tensors:
    return (rows + 1.0,)


def test_weights_that_change_in_place_are_seen_and_moved_ones_are_recorded_again() -> None:
    network, recordings, rows = torch.nn.Linear(3, 2), Recordings(), torch.ones(2, 3)
    call, compute = ReplayedCall(network, recordings), doubled(network)
    call(compute, rows)
    with torch.no_grad():
        network.weight.add_(1.0)
    torch.testing.assert_close(call(compute, rows)[0], network(rows).detach() * 2.0)
    assert recordings.rows == [2]
    network.weight = torch.nn.Parameter(torch.zeros(2, 3))
    torch.testing.assert_close(call(compute, rows)[0], network(rows).detach() * 2.0)
    assert recordings.rows == [2, 2]


def test_few_rows_are_idle() -> None:
    assert [pad_num_rows(rows) for rows in (1, 2, 3, 4, 5, 8, 9, 16, 63)] == [
        1,
        2,
        4,
        4,
        8,
        8,
        12,
        16,
        64,
    ]


def test_shapes_that_were_not_asked_for_longest_are_forgotten() -> None:
    recordings = Recordings()
    call = ReplayedCall(torch.nn.Linear(1, 1), recordings)
    for width in range(1, MAX_RECORDINGS + 2):
        call(plus_one, torch.zeros(1, width))
    assert call.num_recordings == MAX_RECORDINGS
    call(plus_one, torch.zeros(1, 2))
    assert len(recordings.rows) == MAX_RECORDINGS + 1
    call(plus_one, torch.zeros(1, 1))
    assert len(recordings.rows) == MAX_RECORDINGS + 2


def test_a_policy_that_acted_by_recordings_is_freed_with_its_last_name(
    policy: OpenVlaOft, make_observation: MakeObservation
) -> None:
    replaying = policy.copy()
    replaying.replay_acting(True, lambda compute, inputs: Answered(compute(*inputs), inputs))
    act(replaying, [make_observation(0)])
    seen = weakref.ref(replaying)
    gc.disable()
    try:
        del replaying
        assert seen() is None
    finally:
        gc.enable()


class Answered:
    """As a graph: keeps places, and nothing of the call."""

    def __init__(self, results: Tensors, inputs: Tensors) -> None:
        self._results, self.inputs = results, inputs

    def replay(self) -> Tensors:
        return self._results


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
def test_graphs_on_a_gpu_decide_as_kernels_do_while_a_thread_prepares(
    any_policy: Policy, make_observation: MakeObservation
) -> None:
    any_policy.network.to("cuda")
    batches = [[make_observation(seed) for seed in range(rows)] for rows in (3, 1, 5)]
    replaying = any_policy.copy()
    replaying.replay_acting(True)
    with ThreadPoolExecutor(1) as host:
        for _ in range(2):
            preparing = host.submit(lambda: [any_policy.prepare(rows) for rows in batches])
            for rows in (*batches, *batches):
                for tensor, wanted in zip(act(replaying, rows), act(any_policy, rows), strict=True):
                    torch.testing.assert_close(tensor, wanted, atol=1e-3, rtol=0.0)
            preparing.result()
            with torch.no_grad():  # an update in place, of both
                for policy in (any_policy, replaying):
                    next(policy.network.parameters()).mul_(1.1)


@pytest.mark.gpu
@needs_gpu
def test_a_call_that_waits_for_the_gpu_is_named_with_what_to_do() -> None:
    call = ReplayedCall(torch.nn.Linear(1, 1).to("cuda"), CudaRecorder())
    with pytest.raises(
        ConfigError, match=r"cannot be recorded as a CUDA graph .*--engine\.no-cuda-graphs"
    ):
        call(lambda rows: (rows * rows.sum().item(),), torch.ones(2, 2, device="cuda"))
