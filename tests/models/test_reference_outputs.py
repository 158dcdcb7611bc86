"""Policies give the outputs of the reference projects' own code (see `golden/README.md`).

The checkpoint is written in the public layout and read by the loading code that public checkpoints
are read by.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import golden_checkpoint
import golden_recipe
import numpy as np
import pytest
import torch
from golden_checkpoint import (
    DIFFUSION,
    FILM,
    GREEDY,
    HEAD,
    PROPRIO,
    ROWS,
    golden,
    observation,
    observations,
    require_close,
    stacked,
    uncropped,
)

from benchmarks.learner_step import make_trajectories
from benchmarks.plain_policy import PlainPolicy
from vla_rl.models.openvla import OpenVla
from vla_rl.models.openvla_oft import ContinuousOpenVlaOft, OpenVlaOft, policy as oft_policy, tiny
from vla_rl.models.openvla_oft.heads import NUM_DENOISING_STEPS, denoise
from vla_rl.models.prismatic.action_tokens import ActionTokenizer

TEMPERATURE = 1.6


def given(number: int) -> torch.Tensor:
    return torch.from_numpy(np.stack([golden_recipe.given_tokens(row, number) for row in ROWS]))


def environment_actions(theirs: np.ndarray) -> np.ndarray:
    """The projects' actions with the gripper as LIBERO has it, which they turn in their evaluation
    scripts.
    """
    turned = theirs.copy()
    turned[..., -1] = np.where(theirs[..., -1] > 0.5, -1.0, 1.0)
    return turned


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("golden")
    return {
        "plain": golden_checkpoint.write(root / "plain"),
        "l1": golden_checkpoint.write(root / "l1", HEAD, PROPRIO),
        "diffusion": golden_checkpoint.write(root / "diffusion", PROPRIO, *DIFFUSION),
        "film": golden_checkpoint.write(root / "film", HEAD, PROPRIO, FILM),
        "official": golden_checkpoint.write(root / "official", proprio_inside=True),
    }


@pytest.mark.parametrize(
    ("name", "folder", "size"), [("l1", "l1", 224), ("libero", "l1", 256), ("film", "film", 224)]
)
@torch.no_grad()
def test_an_l1_head_regresses_the_chunk_that_openvla_oft_does(
    name: str, folder: str, size: int, folders: dict[str, Path]
) -> None:
    arrays = golden("openvla_oft")
    policy = ContinuousOpenVlaOft.load(folders[folder])
    policy = uncropped(policy) if size == 224 else policy
    batch = policy.prepare(observations(size))
    # one byte of an image that is off by one moves hidden states by up to 2e-3
    atol = 1e-5 if size == 224 else 5e-3
    require_close(policy.network.compute_trunk(batch), stacked(arrays, f"{name}_hidden"), atol)
    numbers = policy.sample(batch, GREEDY).tokens
    require_close(
        policy.decode(numbers.numpy()),
        environment_actions(stacked(arrays, f"{name}_actions")),
        atol,
    )


@torch.no_grad()
def test_every_denoising_step_is_that_of_openvla_oft(folders: dict[str, Path]) -> None:
    arrays = golden("openvla_oft")
    policy = uncropped(ContinuousOpenVlaOft.load(folders["diffusion"], head="diffusion"))
    steps = torch.arange(NUM_DENOISING_STEPS - 1, -1, -1)
    noisy, noise = (
        torch.from_numpy(arrays["diffusion_noisy"]),
        torch.from_numpy(arrays["diffusion_noise"]),
    )
    batch = policy.prepare([observation(0, 224)] * len(steps))
    # 1.01e-5 at worst on a CPU without AVX-512, whose kernels add in another order
    ours = policy.network.predict_noise(batch, noisy, steps)
    require_close(ours, arrays["diffusion_noise"], atol=3e-5)
    denoised = [denoise(noisy[row], noise[row], int(step)) for row, step in enumerate(steps)]
    require_close(torch.stack(denoised[:-1]), arrays["diffusion_noisy"][1:])
    last = policy.decode(denoised[-1].flatten()[None].numpy())
    require_close(last[0], environment_actions(arrays["diffusion_actions_0"]))


@torch.no_grad()
def test_a_diffusion_head_ends_where_openvla_oft_does(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = golden("openvla_oft")
    first = torch.from_numpy(golden_recipe.tensor("first noise", (1, 8, 7))).flatten(1).double()
    uniforms = torch.special.ndtr(first).expand(len(ROWS), -1)
    monkeypatch.setattr(oft_policy, "seeded_uniforms", lambda samplings, number: uniforms)
    policy = uncropped(ContinuousOpenVlaOft.load(folders["diffusion"], head="diffusion"))
    numbers = policy.sample(policy.prepare(observations(224)), GREEDY).tokens
    differs = np.abs(
        policy.decode(numbers.numpy()) - environment_actions(stacked(arrays, "diffusion_actions"))
    )
    # 50 steps of a network of random weights amplify rounding; single steps agree, as the test
    # above shows
    assert np.median(differs) < 1e-4
    assert differs.max() < 0.1


@torch.no_grad()
def test_action_tokens_have_the_logits_of_openvla_oft(folders: dict[str, Path]) -> None:
    arrays = golden("openvla_oft")
    policy = uncropped(OpenVlaOft.load(folders["plain"]))
    batch = policy.prepare(observations(224))
    require_close(policy.network.compute_trunk(batch), stacked(arrays, "tokens_hidden"))
    require_close(policy.network(batch)[:, ::7], stacked(arrays, "tokens_256_logits"))
    sampled = policy.sample(batch, GREEDY)
    tokens, log_probs = sampled.tokens, sampled.log_probs
    np.testing.assert_array_equal(tokens, stacked(arrays, "tokens_256_ids"))
    require_close(log_probs, stacked(arrays, "tokens_256_log_probs"))


def test_token_ids_mean_the_actions_that_openvla_oft_takes_them_for(
    folders: dict[str, Path],
) -> None:
    """Its own decoding takes the likeliest of all ids, and ids that are no action count as the
    nearest one.
    """
    arrays = golden("openvla_oft")
    config = OpenVlaOft.load(folders["plain"]).config
    tokenizer = ActionTokenizer(config.llm.vocab_size, config.num_bins, config.action_bounds)
    ids = stacked(arrays, "tokens_ids").reshape(len(ROWS), 8, 7)
    expected = environment_actions(stacked(arrays, "tokens_actions"))
    np.testing.assert_array_equal(tokenizer.decode(ids), expected.astype(np.float32))


@torch.no_grad()
def test_openvla_speaks_the_tokens_that_its_authors_code_speaks(folders: dict[str, Path]) -> None:
    arrays = golden("openvla")
    policy = uncropped(OpenVla.load(folders["plain"]))
    batch = policy.prepare(observations(224))
    sampled = policy.sample(batch, GREEDY)
    tokens, log_probs = sampled.tokens, sampled.log_probs
    np.testing.assert_array_equal(tokens, stacked(arrays, "tokens"))
    require_close(log_probs, stacked(arrays, "log_probs"))
    require_close(policy.network(batch, tokens)[..., 31744:32000], stacked(arrays, "logits"))
    expected = environment_actions(stacked(arrays, "actions")).astype(np.float32)
    np.testing.assert_array_equal(policy.decode(tokens.numpy())[:, 0], expected)


@pytest.mark.parametrize(
    ("project", "name", "convention"),
    [("rlinf_oft", "rlinf", "rlinf"), ("rlinf_oft", "official", "rlinf_official")],
)
@torch.no_grad()
def test_openvla_oft_acts_and_is_scored_as_in_rlinf(
    project: str, name: str, convention: Any, folders: dict[str, Path]
) -> None:
    arrays = golden(project)
    is_official = name == "official"
    policy = OpenVlaOft.load(
        folders["official" if is_official else "plain"],
        convention=convention,
        cameras=("image", "wrist_image") if is_official else ("image",),
    )
    batch = policy.prepare(observations(256))
    require_rlinf(policy, batch, arrays, name, 56)


@torch.no_grad()
def test_openvla_acts_and_is_scored_as_in_rlinf(folders: dict[str, Path]) -> None:
    policy = OpenVla.load(folders["plain"], convention="rlinf")
    require_rlinf(policy, policy.prepare(observations(256)), golden("rlinf_ar"), "ar", 7)


def require_rlinf(
    policy: Any, batch: Any, arrays: dict[str, np.ndarray], name: str, number: int
) -> None:
    for ids, theirs in zip(batch.prompts, arrays[f"{name}_prompt_ids"], strict=True):
        padding = policy.config.llm.pad_token_id
        assert [id_ for id_ in ids.tolist() if id_ != padding] == [
            id_ for id_ in theirs.tolist() if id_ != padding
        ]
    sampled = policy.sample(batch, GREEDY)
    tokens, log_probs = sampled.tokens, sampled.log_probs
    np.testing.assert_array_equal(tokens, arrays[f"{name}_tokens"])
    require_close(log_probs, arrays[f"{name}_log_probs"])
    expected = environment_actions(arrays[f"{name}_actions"]).astype(np.float32)
    np.testing.assert_array_equal(policy.decode(tokens.numpy()), expected)
    scores, entropies = policy.log_probs(
        batch, given(number), torch.full((len(ROWS),), TEMPERATURE)
    )
    require_close(scores, arrays[f"{name}_given_log_probs"])
    require_close(entropies, arrays[f"{name}_given_entropies"])


@torch.no_grad()
def test_openvla_oft_acts_and_is_scored_as_in_simplevla_rl(folders: dict[str, Path]) -> None:
    arrays = golden("simplevla_oft")
    policy = uncropped(OpenVlaOft.load(folders["plain"], convention="simplevla"))
    batch = policy.prepare(observations(224))
    tokens = policy.sample(batch, GREEDY).tokens
    np.testing.assert_array_equal(tokens, arrays["oft_tokens"])
    expected = environment_actions(arrays["oft_actions"]).astype(np.float32)
    np.testing.assert_array_equal(policy.decode(tokens.numpy()), expected)
    scores, entropies = policy.log_probs(batch, given(56), torch.full((len(ROWS),), TEMPERATURE))
    require_close(scores, stacked(arrays, "oft_given_log_probs"))
    require_close(entropies, stacked(arrays, "oft_given_entropies"))


@torch.no_grad()
def test_openvla_acts_and_is_scored_as_in_simplevla_rl(folders: dict[str, Path]) -> None:
    arrays = golden("simplevla_ar")
    policy = uncropped(OpenVla.load(folders["plain"], convention="simplevla"))
    batch = policy.prepare(observations(224))
    tokens = policy.sample(batch, GREEDY).tokens
    np.testing.assert_array_equal(tokens, stacked(arrays, "ar_tokens"))
    scores, entropies = policy.log_probs(batch, given(7), torch.full((len(ROWS),), TEMPERATURE))
    require_close(scores, stacked(arrays, "ar_given_log_probs"))
    require_close(entropies, stacked(arrays, "ar_given_entropies"))


MakeObservation = Callable[..., dict[str, Any]]


def test_the_plain_policy_gives_the_same_logits(make_observation: MakeObservation) -> None:
    policy = OpenVlaOft.create(tiny(image_size=28), seed=0)
    plain = PlainPolicy(policy.config, policy.network, policy.tokenizer)
    observations = [make_observation(seed) for seed in range(3)]
    with torch.no_grad():
        expected = policy.network(policy.prepare(observations))
        found = plain.action_logits(plain.pixels(observations), observations)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def test_the_plain_update_leaves_the_gradient_of_the_clipped_surrogate() -> None:
    policy = OpenVlaOft.create(tiny(image_size=28), seed=0)
    plain = PlainPolicy(policy.config, policy.network, policy.tokenizer)
    trajectories = make_trajectories(policy, num=2, mean_steps=16)
    advantages = [1.0, -0.5]
    plain.update(trajectories, advantages, num_chunks=4)
    found = policy.network.projector.fc3.weight.grad
    assert found is not None
    found = found.clone()
    policy.network.zero_grad()
    num_tokens = sum(len(trajectory.steps) for trajectory in trajectories) * 56
    for trajectory, advantage in zip(trajectories, advantages, strict=True):
        batch = policy.prepare([step.observation for step in trajectory.steps])
        tokens = torch.from_numpy(np.stack([step.chunk.tokens for step in trajectory.steps]))
        log_probs, _ = policy.log_probs(batch, tokens, torch.ones(len(tokens)))
        # at a ratio of 1 the surrogate's gradient is that of -A log p
        torch.autograd.backward(-advantage * log_probs.sum() / num_tokens)
    torch.testing.assert_close(
        found, policy.network.projector.fc3.weight.grad, atol=1e-6, rtol=1e-3
    )
