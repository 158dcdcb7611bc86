"""OpenVLA, one token after the other: equal to the libraries alone, to itself in batches, and to
what it saved.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import public_checkpoint
import pytest
import torch

from vla_rl.errors import ConfigError
from vla_rl.models.openvla import OpenVla
from vla_rl.models.prismatic.config import TINY_TOKENIZER, OpenVlaConfig, tiny
from vla_rl.types import Sampling

MakeObservation = Callable[..., dict[str, Any]]
INSTRUCTIONS = (
    "push",
    "turn on the stove",
    "pick up the black bowl on the stove and place it on the plate",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("public") / "ar"
    public_checkpoint.write(folder, public_checkpoint.Parts(seed=0), TINY_TOKENIZER)
    return folder


@pytest.fixture(scope="module")
def policy(folder: Path) -> OpenVla:
    return OpenVla.load(folder, norm_key="libero_goal")


def test_greedy_tokens_and_their_log_probs_are_what_the_libraries_alone_give(
    policy: OpenVla, make_observation: MakeObservation
) -> None:
    parts = public_checkpoint.Parts(seed=0)
    observations = [make_observation(index, text) for index, text in enumerate(INSTRUCTIONS)]
    with torch.no_grad():
        batch = policy.prepare(observations)
        sampled = policy.sample(batch, [Sampling(greedy=True)] * 3)
        tokens, log_probs = sampled.tokens, sampled.log_probs
        for row, observation in enumerate(observations):
            prompt = public_checkpoint.prompt_ids(TINY_TOKENIZER, observation["instruction"])
            ids, logits = parts.generate(batch.images[row, 0], prompt, num_tokens=7)
            assert tokens[row].tolist() == ids
            expected = logits.log_softmax(-1).max(-1).values
            torch.testing.assert_close(log_probs[row], expected, atol=1e-5, rtol=0)


def test_the_mean_of_tokens_that_follow_each_other_is_refused(
    policy: OpenVla, make_observation: MakeObservation
) -> None:
    batch = policy.prepare([make_observation(0, INSTRUCTIONS[0])])
    with pytest.raises(ValueError, match="chooses one token after another, or no tokens"):
        policy.sample(batch, [Sampling(greedy=True, by_mean=True)])


def test_learning_sees_the_log_probs_that_acting_reported(
    policy: OpenVla, make_observation: MakeObservation
) -> None:
    observations = [make_observation(index, text) for index, text in enumerate(INSTRUCTIONS)]
    samplings = [Sampling(temperature=1.6, seed=seed) for seed in range(3)]
    with torch.no_grad():
        sampled = policy.sample(policy.prepare(observations), samplings)
        tokens, acted = sampled.tokens, sampled.log_probs
        learned, entropy = policy.log_probs(
            policy.prepare(observations), tokens, torch.full((3,), 1.6)
        )
    torch.testing.assert_close(learned, acted, atol=1e-5, rtol=0)
    assert entropy.min().item() > 0.0


def test_a_row_depends_on_its_own_seed_and_observation_only(
    policy: OpenVla, make_observation: MakeObservation
) -> None:
    observations = [make_observation(index, text) for index, text in enumerate(INSTRUCTIONS)]
    samplings = [Sampling(temperature=1.6, seed=seed) for seed in range(3)]
    with torch.no_grad():
        together = policy.sample(policy.prepare(observations), samplings).tokens
        for row, pair in enumerate(zip(observations, samplings, strict=True)):
            alone = policy.sample(policy.prepare([pair[0]]), [pair[1]]).tokens
            assert torch.equal(alone[0], together[row])


def test_a_later_token_does_not_change_an_earlier_logit(
    policy: OpenVla, make_observation: MakeObservation
) -> None:
    batch = policy.prepare([make_observation(0)])
    tokens = torch.full((1, 7), 900)
    changed = tokens.clone()
    changed[0, 3] = 800
    with torch.no_grad():
        before, after = (policy.network(batch, ids) for ids in (tokens, changed))
    assert torch.equal(before[0, :4], after[0, :4])
    assert not torch.equal(before[0, 4], after[0, 4])


def test_probabilities_over_the_action_tokens_alone_are_a_setting(
    policy: OpenVla, make_observation: MakeObservation
) -> None:
    import msgspec

    narrow = OpenVla(
        msgspec.structs.replace(policy.config, vocabulary="actions"),
        type(policy.network)(msgspec.structs.replace(policy.config, vocabulary="actions")),
        policy._tokenizer,
    )
    narrow.load_checkpoint_tensors(policy.checkpoint_tensors())
    batch = policy.prepare([make_observation(0)])
    with torch.no_grad():
        tokens = narrow.sample(batch, [Sampling(seed=1)]).tokens
        wide, _ = policy.log_probs(batch, tokens, torch.ones(1))
        restricted, _ = narrow.log_probs(batch, tokens, torch.ones(1))
        everything = policy.network(batch, tokens).log_softmax(-1)[..., 768:1024].logsumexp(-1)
    assert tokens.min() >= 768
    assert tokens.max() <= 1023
    torch.testing.assert_close(restricted, wide - everything, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("convention", "vocabulary"),
    [
        (None, "all"),
        ("openvla_oft", "all"),
        ("simplevla", "all"),
        ("rlinf", "actions"),
        ("rlinf_official", "actions"),
    ],
)
def test_a_convention_decides_over_which_ids_probabilities_are_normalised(
    convention: Any, vocabulary: str, folder: Path, tmp_path: Path
) -> None:
    policy = OpenVla.load(folder, norm_key="libero_goal", convention=convention)
    assert policy.config.vocabulary == vocabulary
    policy.save(tmp_path / "again")
    assert OpenVla.load(tmp_path / "again", convention=convention).config.vocabulary == vocabulary


@pytest.mark.parametrize("vocabulary", ["all", "actions"])
def test_an_argument_overrides_the_vocabulary_of_the_convention_and_of_a_saved_policy(
    vocabulary: Any, folder: Path, tmp_path: Path
) -> None:
    other = {"all": "actions", "actions": "all"}
    policy = OpenVla.load(folder, norm_key="libero_goal", convention="rlinf", vocabulary=vocabulary)
    assert policy.config.vocabulary == vocabulary
    policy.save(tmp_path / "again")
    assert OpenVla.load(tmp_path / "again").config.vocabulary == vocabulary
    assert (
        OpenVla.load(tmp_path / "again", vocabulary=other[vocabulary]).config.vocabulary
        == other[vocabulary]
    )


def test_one_decision_is_one_control_step(policy: OpenVla) -> None:
    actions = policy.decode(np.full((2, 7), 900))
    assert actions.shape == (2, 1, 7)
    assert policy.encode(actions).tolist() == np.full((2, 7), 900).tolist() or actions[0, 0, 6] in (
        -1.0,
        1.0,
    )
    with pytest.raises(ValueError, match=r"expected \[B, 1, 7\]"):
        policy.encode(np.zeros((2, 8, 7)))


def test_everything_but_our_own_file_comes_back_byte_for_byte(
    policy: OpenVla, folder: Path, tmp_path: Path
) -> None:
    policy.save(tmp_path / "again")
    for path in folder.iterdir():
        if path.name != "vla_rl.json":
            assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name
    assert OpenVla.load(tmp_path / "again").config.norm_key == "libero_goal_no_noops"


def test_two_cameras_are_refused() -> None:
    shape = tiny(image_size=28)
    with pytest.raises(ConfigError, match="one camera"):
        OpenVlaConfig(
            cameras=("image", "wrist_image"),
            tokenizer_file=shape.tokenizer_file,
            action_bounds=shape.action_bounds,
        )
