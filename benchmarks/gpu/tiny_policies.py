"""A small policy of every family, with observations and episodes for it."""

import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from benchmarks.gpu.crossings import unwatched
from vla_rl.models.language import CausalLanguageModel, TinyConfig, tiny
from vla_rl.models.mlp import MlpConfig, MlpPolicy
from vla_rl.models.openvla import OpenVla
from vla_rl.models.openvla_oft import ContinuousOpenVlaOft, OpenVlaOft, tiny as tiny_oft
from vla_rl.models.prismatic.config import LoraConfig, OpenVlaConfig, VisionTowerConfig
from vla_rl.types import (
    ActionChunk,
    EnvSpec,
    EpisodeSpec,
    Observation,
    Step,
    StopReason,
    Trajectory,
)

PROMPT: Final = (5, 6, 7, 8, 9, 10, 11, 12)


def _oft(**fields: Any) -> Any:
    config = tiny_oft(image_size=28, chunk_size=2)
    # a tower's last block never runs, and the trunk's last layer has code of its own
    towers = {
        name: VisionTowerConfig(timm_id=tower.timm_id, overrides={**tower.overrides, "depth": 2})
        for name, tower in (
            ("featurizer", config.featurizer),
            ("fused_featurizer", config.fused_featurizer),
        )
    }
    llm = msgspec.structs.replace(config.llm, num_layers=2)
    return msgspec.structs.replace(config, llm=llm, **towers, **fields)


def _openvla() -> OpenVla:
    shared = {
        name: getattr(_oft(), name)
        for name in OpenVlaConfig.__struct_fields__
        if hasattr(_oft(), name)
    }
    return OpenVla.create(OpenVlaConfig(**{**shared, "cameras": ("image",)}), seed=0)


def _mlp() -> MlpPolicy:
    config = MlpConfig(
        state_size=8, action_low=(-1.0,) * 2, action_high=(1.0,) * 2, chunk_size=2, num_bins=5
    )
    return MlpPolicy.create(config, seed=0)


def _language() -> CausalLanguageModel:
    shape = TinyConfig(
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        intermediate_size=64,
        vocab_size=300,
        context_size=256,
    )
    return tiny(shape, ["one two"], seed=0)


FAMILIES: Final[dict[str, Callable[[], Any]]] = {
    "openvla": _openvla,
    "oft tokens": lambda: OpenVlaOft.create(_oft(), seed=0),
    "oft film": lambda: OpenVlaOft.create(_oft(has_film=True), seed=0),
    "oft adapters": lambda: OpenVlaOft.create(_oft(), seed=0).adapted(LoraConfig(rank=2), seed=1),
    "oft l1": lambda: ContinuousOpenVlaOft.create(_oft(head="l1"), seed=0),
    "oft diffusion": lambda: ContinuousOpenVlaOft.create(_oft(head="diffusion"), seed=0),
    "mlp": _mlp,
    "language": _language,
}
"""Makes a policy of each family, on the host."""


@cache
def policy_on_host(family: str) -> Any:
    """Return a policy of a family; it is shared, so copy it before changing it."""
    with unwatched():
        return FAMILIES[family]()


def policy_on_meta(family: str) -> Any:
    """Return a copy of a family's policy on the meta device; made unseen by a watch."""
    with unwatched():
        return _on_meta(family).copy()


@cache
def _on_meta(family: str) -> Any:
    policy = policy_on_host(family).copy()
    policy.network.to("meta")
    return policy


def observation(family: str, number: int) -> Observation:
    """Return an observation of a family, with words or a prompt of one of two lengths."""
    if family == "language":
        return {"prompt_tokens": np.array(PROMPT[: 8 - 5 * (number % 2)])}
    rng = np.random.default_rng(number)
    frames = rng.integers(0, 256, (2, 40, 40, 3), dtype=np.uint8)
    words = ("turn on the stove", "go to the right hand side now")[number % 2]
    state = rng.normal(size=8).astype(np.float32)
    return {"image": frames[0], "wrist_image": frames[1], "state": state, "instruction": words}


def demonstrated(family: str) -> np.ndarray:
    """Return an action chunk of zeros [H, D], or the tokens of a reply [1, T]."""
    if family == "language":
        return np.array([[20, 21, 22]])
    config = policy_on_host(family).config
    return np.zeros((getattr(config, "chunk_size", 1), config.action_dim), np.float32)


def trajectory(family: str, number: int, num_steps: int = 2) -> Trajectory:
    """Return an episode of decisions that the policy might have made."""
    actions = demonstrated(family)
    (tokens,) = policy_on_host(family).encode(actions[None])
    chunk = ActionChunk(
        actions=actions,
        tokens=tokens,
        log_probs=np.full(len(tokens), -1.0, np.float32),
        weight_version=0,
    )
    rewards = np.zeros(len(actions), np.float32)
    steps = tuple(
        Step(observation=observation(family, number + each), chunk=chunk, rewards=rewards)
        for each in range(num_steps)
    )
    episode = EpisodeSpec(
        episode_id=number,
        group_id=0,
        member=number,
        env=EnvSpec(id="none"),
        task="none",
        seed=0,
        policy_seed=0,
    )
    return Trajectory(
        episode=episode,
        steps=steps,
        final_observation=observation(family, number),
        stop_reason=StopReason.TIME_LIMIT,
    )


def trajectories(family: str) -> Sequence[Trajectory]:
    """Return three episodes, of several rows and lengths."""
    return [trajectory(family, number, 1 + number) for number in range(3)]


def uneven_conversations() -> Sequence[Trajectory]:
    """Return episodes of a language policy, of which one has a prompt as long as several others: such
    rows are read end to end."""
    first, *others = trajectories("language")
    (step,) = first.steps
    long = msgspec.structs.replace(step, observation={"prompt_tokens": np.arange(5, 65)})
    return [msgspec.structs.replace(first, steps=(long,)), *others]


@cache
def vjepa2_folder() -> str:
    """Write a V-JEPA 2 checkpoint of a few thousand parameters, as transformers writes it."""
    import torch
    from transformers import VJEPA2Config, VJEPA2Model

    shape = VJEPA2Config(
        crop_size=32,
        frames_per_clip=8,
        hidden_size=48,
        num_attention_heads=2,
        num_hidden_layers=2,
        pred_hidden_size=24,
        pred_num_attention_heads=2,
        pred_num_hidden_layers=1,
    )
    folder = tempfile.TemporaryDirectory(prefix="vjepa2-")
    _KEPT.append(folder)
    with unwatched(), torch.random.fork_rng():
        VJEPA2Model(shape).save_pretrained(folder.name)
    return str(Path(folder.name))


_KEPT: Final[list[tempfile.TemporaryDirectory[str]]] = []
"""Folders that are removed when the process ends."""
