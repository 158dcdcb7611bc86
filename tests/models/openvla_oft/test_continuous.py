"""Continuous heads: the public parts beside the weights, likelihoods that are minus the L1 error,
and denoising.
"""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import public_checkpoint
import pytest
import torch
from made_inputs import shallow
from safetensors.torch import load_file

from vla_rl.engines import DeviceLane
from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.learner import Demonstration, ImitationConfig, Imitator, OptimizerConfig
from vla_rl.models.openvla_oft import (
    ContinuousOpenVlaOft,
    OpenVlaOft,
    OpenVlaOftConfig,
    policy as oft_policy,
    tiny,
)
from vla_rl.models.openvla_oft.heads import add_noise, cumulative_alphas, denoise
from vla_rl.models.prismatic.config import TINY_TOKENIZER
from vla_rl.types import Sampling

MakeObservation = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A public checkpoint with an L1 head and a proprio projector beside it."""
    folder = tmp_path_factory.mktemp("public") / "l1"
    parts = public_checkpoint.Parts(seed=1)
    public_checkpoint.write(folder, parts, TINY_TOKENIZER)
    parts.write_parts(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(folder: Path) -> ContinuousOpenVlaOft:
    return ContinuousOpenVlaOft.load(folder, norm_key="libero_goal")


@pytest.fixture(scope="module")
def regressing() -> ContinuousOpenVlaOft:
    """New, with an L1 head."""
    return ContinuousOpenVlaOft.create(shallow(tiny(image_size=28, head="l1")), seed=0)


def observation_of(size: int = 28) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    return {
        "image": rng.integers(0, 256, (size, size, 3), dtype=np.uint8),
        "wrist_image": rng.integers(0, 256, (size, size, 3), dtype=np.uint8),
        "state": rng.uniform(-1, 1, 8).astype(np.float32),
        "instruction": "put the bowl on the stove",
    }


def test_a_public_checkpoint_acts_as_the_libraries_alone_say(loaded: ContinuousOpenVlaOft) -> None:
    parts = public_checkpoint.Parts(seed=1)
    observation = observation_of()
    batch = loaded.prepare([observation])
    with torch.no_grad():
        numbers = loaded.sample(batch, [Sampling(greedy=True)]).tokens
        assert batch.proprio is not None
        prompt = public_checkpoint.prompt_ids(TINY_TOKENIZER, observation["instruction"])
        hidden = parts.read(list(batch.images[0]), prompt, batch.proprio[0], num_numbers=56)
        expected = parts.regress(hidden, action_dim=7)
    torch.testing.assert_close(numbers.view(8, 7), expected, atol=2e-5, rtol=0)


def test_a_public_diffusion_head_sees_the_noise_that_the_libraries_alone_say(
    tmp_path: Path,
) -> None:
    parts = public_checkpoint.Parts(seed=2)
    public_checkpoint.write(tmp_path / "diffusion", parts, TINY_TOKENIZER)
    parts.write_parts(tmp_path / "diffusion", diffusion=True)
    policy = ContinuousOpenVlaOft.load(
        tmp_path / "diffusion", head="diffusion", norm_key="libero_goal"
    )
    observation, noisy = observation_of(), torch.randn(1, 8, 7)
    batch = policy.prepare([observation])
    assert batch.proprio is not None
    prompt = public_checkpoint.prompt_ids(TINY_TOKENIZER, observation["instruction"])
    for step in (0, 37):
        with torch.no_grad():
            found = policy.network.predict_noise(batch, noisy, torch.tensor([step]))[0]
            hidden = parts.read(
                list(batch.images[0]), prompt, batch.proprio[0], 56, noisy=(noisy.flatten(), step)
            )
            expected = parts.regress(hidden, action_dim=7)
        torch.testing.assert_close(found, expected, atol=3e-5, rtol=0)


def test_proprioception_is_scaled_by_the_percentiles_of_the_chosen_set(
    loaded: ContinuousOpenVlaOft,
) -> None:
    observation = observation_of()
    proprio = loaded.prepare([observation]).proprio
    assert proprio is not None  # q01 = -1 and q99 = 1, so scaling changes the last bits at most
    np.testing.assert_allclose(proprio[0].numpy(), observation["state"], atol=1e-6)


def test_a_saved_one_loads_to_the_same_numbers(
    folder: Path, loaded: ContinuousOpenVlaOft, tmp_path: Path
) -> None:
    loaded.save(tmp_path / "again")
    again = ContinuousOpenVlaOft.load(tmp_path / "again")
    assert again.config.head == "l1"
    batch = loaded.prepare([observation_of()])
    with torch.no_grad():
        first, second = (
            model.sample(batch, [Sampling(greedy=True)]).tokens for model in (loaded, again)
        )
    assert torch.equal(first, second)
    assert (tmp_path / "again" / "config.json").read_bytes() == (
        folder / "config.json"
    ).read_bytes()


@pytest.mark.parametrize(
    ("head", "parts"),
    [
        ("l1", ["action_head", "proprio_projector"]),
        ("diffusion", ["action_head", "noisy_action_projector", "proprio_projector"]),
    ],
)
def test_a_continuous_policy_is_saved_in_the_authors_parts(
    head: Any, parts: list[str], tmp_path: Path
) -> None:
    policy = ContinuousOpenVlaOft.create(tiny(image_size=28, head=head), seed=0)
    policy.save(tmp_path / "ours")
    assert sorted(path.name for path in (tmp_path / "ours").glob("*.pt")) == [
        f"{part}--latest_checkpoint.pt" for part in parts
    ]
    main = load_file(tmp_path / "ours" / "model.safetensors")
    assert {name.partition(".")[0] for name in main} == {
        "vision_backbone",
        "projector",
        "language_model",
    }
    again, tensors = (
        ContinuousOpenVlaOft.load(tmp_path / "ours").checkpoint_tensors(),
        policy.checkpoint_tensors(),
    )
    assert again.keys() == tensors.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in tensors.items())


def test_two_candidates_for_a_part_are_named(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "action_head--latest_checkpoint.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="expected one file for action_head"):
        ContinuousOpenVlaOft.load(tmp_path, norm_key="libero_goal")


def test_a_part_that_would_run_code_is_refused(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    torch.save({"fc1": print}, tmp_path / "action_head--150000_checkpoint.pt")
    with pytest.raises(
        CheckpointError, match="holds more than tensors by name; expected a state dict"
    ):
        ContinuousOpenVlaOft.load(tmp_path, norm_key="libero_goal")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda whole: whole[: len(whole) // 2],
            r"is not a whole PyTorch file \(\d+ bytes\); download it again",
        ),
        (lambda whole: b"", r"is not a whole PyTorch file \(0 bytes\); download it again"),
        (
            lambda whole: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "is a Git LFS pointer",
        ),
        (
            lambda whole: whole.replace(b"layer_norm1", b"\xff\xfe\xfd_norm1"),
            "cannot be read: .*; download it again",
        ),
    ],
)
def test_a_damaged_part_is_named(
    damage: Callable[[bytes], bytes], message: str, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "l1")
    part = tmp_path / "l1" / "action_head--150000_checkpoint.pt"
    part.write_bytes(damage(part.read_bytes()))
    with pytest.raises(CheckpointError, match=message):
        ContinuousOpenVlaOft.load(tmp_path / "l1", norm_key="libero_goal")


def test_a_token_policy_refuses_a_continuous_configuration() -> None:
    with pytest.raises(ConfigError, match="ContinuousOpenVlaOft"):
        OpenVlaOft.create(tiny(image_size=28, head="l1"), seed=0)


def test_the_likelihood_at_temperature_one_is_minus_the_absolute_error(
    regressing: ContinuousOpenVlaOft, make_observation: MakeObservation
) -> None:
    batch = regressing.prepare([make_observation(0)])
    with torch.no_grad():
        centre = regressing.sample(batch, [Sampling(greedy=True)]).tokens
        log_probs, entropy = regressing.log_probs(batch, centre + 0.25, torch.ones(1))
    torch.testing.assert_close(
        log_probs, torch.full((1, 56), -0.25 - math.log(2.0)), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(entropy, torch.full((1, 56), 1.0 + math.log(2.0)), atol=1e-6, rtol=0)


def test_sampled_numbers_scatter_by_the_temperature(
    regressing: ContinuousOpenVlaOft, make_observation: MakeObservation
) -> None:
    """A Laplace distribution of scale b has a mean absolute deviation of b."""
    observations = [make_observation(0)] * 64
    with torch.no_grad():
        batch = regressing.prepare(observations)
        centre = regressing.sample(batch, [Sampling(greedy=True)] * 64).tokens
        sampled = regressing.sample(
            batch, [Sampling(temperature=0.1, seed=seed) for seed in range(64)]
        )
        numbers, acted = sampled.tokens, sampled.log_probs
        learned, _ = regressing.log_probs(batch, numbers, torch.full((64,), 0.1))
    assert (numbers - centre).abs().mean().item() == pytest.approx(0.1, rel=0.05)
    torch.testing.assert_close(learned, acted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("has_film", [True, pytest.param(False, marks=pytest.mark.proof)])
async def test_imitation_brings_the_l1_head_towards_what_was_shown(
    has_film: bool, make_observation: MakeObservation
) -> None:
    before, after, _ = await imitate(
        tiny(image_size=28, chunk_size=2, head="l1", has_film=has_film), make_observation, 12
    )
    assert after["imitation/l1"] < 0.5 * before["imitation/l1"]


async def test_imitation_trains_the_diffusion_head_to_see_the_noise(
    make_observation: MakeObservation,
) -> None:
    torch.manual_seed(0)  # of the noise that imitation adds
    *_, losses = await imitate(
        tiny(image_size=28, chunk_size=2, head="diffusion"), make_observation, 20
    )
    assert losses[0] > 0.9  # what guessing no noise at all costs is its variance, 1
    assert np.mean(losses[-5:]) < 0.5


async def imitate(
    config: OpenVlaOftConfig, make_observation: MakeObservation, num_updates: int
) -> tuple[dict[str, float], dict[str, float], list[float]]:
    """Updates on 8 chunks of 0.5: greedy errors before and after, and the losses."""
    policy = ContinuousOpenVlaOft.create(shallow(config), seed=0)
    shown = [
        Demonstration(
            observation=make_observation(seed),
            actions=np.full((2, 7), 0.5, np.float32),
            num_valid=2,
        )
        for seed in range(8)
    ]
    optimizer = OptimizerConfig(lr=2e-3, warmup_steps=0)
    async with DeviceLane(num_threads=1) as lane:
        imitator = Imitator(policy, lane, ImitationConfig(optimizer=optimizer))
        before = await imitator.evaluate(shown[:2])
        losses = [
            (await imitator.train_step(shown)).metrics["imitation/loss"] for _ in range(num_updates)
        ]
        return before, await imitator.evaluate(shown[:2]), losses


def test_noise_takes_the_signal_away_step_by_step() -> None:
    alphas = cumulative_alphas()
    assert alphas.shape == (50,)
    assert bool((alphas.diff() < 0).all())
    assert 0.99 < alphas[0] < 1.0
    assert alphas[-1] < 1e-3


def test_one_step_of_denoising_by_the_true_noise_leaves_the_noise_of_the_step_before() -> None:
    generator = torch.Generator().manual_seed(0)
    clean = torch.rand(1, 2, 3, generator=generator) * 1.8 - 0.9
    noise = torch.randn(1, 2, 3, generator=generator)
    noisy = add_noise(clean, noise, torch.tensor([30]))
    torch.testing.assert_close(
        denoise(noisy, noise, 30), add_noise(clean, noise, torch.tensor([29])), atol=1e-5, rtol=0
    )
    last = add_noise(clean, noise, torch.tensor([0]))
    torch.testing.assert_close(denoise(last, noise, 0), clean, atol=1e-5, rtol=0)


def test_the_instruction_modulates_the_towers_under_film(make_observation: MakeObservation) -> None:
    policy = ContinuousOpenVlaOft.create(tiny(image_size=28, head="l1", has_film=True), seed=0)
    one, other = (
        policy.prepare([make_observation(0, text)]) for text in ("push", "turn on the stove")
    )
    seen: list[torch.Tensor] = []
    policy.network.projector.register_forward_hook(
        lambda _module, inputs, _output: seen.append(inputs[0])
    )
    with torch.no_grad():
        for batch in (one, other):
            policy.network.compute_trunk(batch)
        assert torch.equal(seen[0], seen[1])  # scale and shift are zero at first
        for parameter in policy.network.film.parameters():
            parameter.add_(0.1)
        for batch in (one, other):
            policy.network.compute_trunk(batch)
    assert not torch.equal(seen[2], seen[3])


@pytest.mark.parametrize("has_film", [False, True])
def test_images_are_looked_at_once_for_all_denoising_steps(
    has_film: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # each step of denoising is the same call: five instead of fifty of them
    monkeypatch.setattr(oft_policy, "NUM_DENOISING_STEPS", 5)
    policy = ContinuousOpenVlaOft.create(
        tiny(image_size=28, head="diffusion", has_film=has_film), seed=0
    )
    looks: list[int] = []
    policy.network.projector.register_forward_hook(lambda *_: looks.append(1))
    batch = policy.prepare([observation_of()])
    with torch.no_grad():
        policy.sample(batch, [Sampling(seed=1)])
        assert len(looks) == 1
        noisy, steps = torch.zeros(1, 8, 7), torch.tensor([3])
        again = policy.network.predict_noise(batch, noisy, steps)
        torch.testing.assert_close(
            policy.network.predict_noise(
                batch, noisy, steps, policy.network.embed_observation(batch)
            ),
            again,
        )
