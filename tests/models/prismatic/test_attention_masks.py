"""Attention gets a mask only if there is padding to hide, and never one of the sequence's square."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vla_rl.models.openvla import OpenVla
from vla_rl.models.openvla_oft import OpenVlaOft
from vla_rl.models.prismatic.config import OpenVlaConfig, tiny

MakeObservation = Callable[..., dict[str, Any]]
Policy = OpenVla | OpenVlaOft

SHORT, LONG = "push", "pick up the black bowl on the stove and place it on the plate"


@pytest.fixture(scope="module", params=["openvla", "oft"])
def either(request: pytest.FixtureRequest) -> Policy:
    shape = tiny(image_size=28, cameras=("image",), proprio=None)
    if request.param == "oft":
        return OpenVlaOft.create(shape, seed=0)
    shared = {
        name: getattr(shape, name)
        for name in ("featurizer", "fused_featurizer", "image_size", "cameras", "llm")
    }
    config = OpenVlaConfig(
        **shared, tokenizer_file=shape.tokenizer_file, action_bounds=shape.action_bounds
    )
    return OpenVla.create(config, seed=0)


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The masks that attention was given, in order."""
    given: list[Tensor] = []
    attend = nn.functional.scaled_dot_product_attention

    def noted(*args: Any, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        if attn_mask is not None:
            given.append(attn_mask)
        return attend(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", noted)
    return given


def learnt(policy: Policy, batch: Any) -> tuple[Tensor, Tensor]:
    """Return log-probs of rows, and the gradient of all weights."""
    tokens = torch.full((2, policy.config.chunk_size * policy.config.action_dim), 1000)
    policy.network.zero_grad()
    log_probs, _ = policy.log_probs(batch, tokens, torch.ones(2))
    torch.autograd.backward(log_probs.sum())
    grads = [each.grad.flatten() for each in policy.network.parameters() if each.grad is not None]
    return log_probs.detach(), torch.cat(grads)


def test_rows_of_one_length_need_no_mask(
    either: Policy, make_observation: MakeObservation, masks: list[Tensor]
) -> None:
    batch = either.prepare([make_observation(seed, LONG) for seed in range(2)])
    learnt(either, batch)  # with it, the network's first check, which tries a mask too
    masks.clear()
    found = learnt(either, batch)
    # a causal trunk's last layer is computed at few positions, whose places are no corner of a square
    expected_shapes = [] if isinstance(either, OpenVlaOft) else [(2, 1, 7)]
    assert [mask.shape[:3] for mask in masks] == expected_shapes
    # padded to a greater width: as an engine that records CUDA graphs is given them
    padded = learnt(either, batch.widened(16, either.config.llm.pad_token_id))
    for one, other in zip(found, padded, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_a_mask_of_padding_is_a_line_for_each_row(
    either: Policy, make_observation: MakeObservation, masks: list[Tensor]
) -> None:
    batch = either.prepare([make_observation(0, SHORT), make_observation(1, LONG)])
    found = learnt(either, batch)
    masks.clear()
    torch.testing.assert_close(learnt(either, batch), found, atol=0, rtol=0)
    most_queries = 1 if isinstance(either, OpenVlaOft) else 7
    assert masks
    assert all(mask.shape[2] <= most_queries for mask in masks)
    # and padding is hidden: other ids there change nothing
    other = replace(
        batch,
        prompts=torch.where(
            torch.arange(batch.prompts.shape[1]) < batch.prompt_lengths[:, None], batch.prompts, 7
        ),
    )
    torch.testing.assert_close(learnt(either, other)[0], found[0], atol=1e-6, rtol=0)
