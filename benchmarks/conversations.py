"""Conversations of a tiny language policy, with the log-probs that it gives its own replies."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers

from vla_rl.models.language import CausalLanguageModel, TinyConfig
from vla_rl.models.language.tiny import write_tokenizer
from vla_rl.types import (
    ActionChunk,
    EnvSpec,
    EpisodeSpec,
    Step,
    StopReason,
    Trajectory,
    make_conversation_observation,
)

SHAPE = TinyConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=64,
    vocab_size=300,
    context_size=256,
)


QWEN3: Any = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}


def qwen3() -> CausalLanguageModel:
    """A tiny network of Qwen3's architecture, with weights of its own in the output head."""
    shape = transformers.Qwen3Config(**QWEN3, intermediate_size=64, tie_word_embeddings=False)
    return with_random_weights(transformers.Qwen3ForCausalLM, shape)


def with_random_weights(kind: Any, shape: Any) -> CausalLanguageModel:
    """A policy on a network of transformers."""
    with TemporaryDirectory() as folder, torch.random.fork_rng():
        torch.manual_seed(0)
        write_tokenizer(Path(folder), SHAPE, ["a"])
        kind(shape).save_pretrained(folder)
        return CausalLanguageModel.load(Path(folder))


def turn(
    policy: CausalLanguageModel,
    prompt: Sequence[int],
    reply: Sequence[int],
    *,
    agent: str = "policy",
    versions: Sequence[int] | None = None,
    images: Sequence[np.ndarray] = (),
    image_starts: Sequence[int] = (),
) -> Step:
    """A reply with the log-probs that the policy itself gives it."""
    tokens = np.array(reply)
    observation = make_conversation_observation(np.array(prompt), images, image_starts)
    with torch.inference_mode():
        log_probs, _ = policy.log_probs(
            policy.prepare([observation]), torch.from_numpy(tokens)[None], torch.ones(1)
        )
    chunk = ActionChunk(
        actions=tokens[None],
        tokens=tokens,
        log_probs=log_probs[0].numpy(),
        weight_version=0 if versions is None else min(versions),
        weight_versions=None if versions is None else np.array(versions),
    )
    return Step(observation=observation, chunk=chunk, rewards=np.zeros(1, np.float32), agent=agent)


def episode(
    number: int, *steps: Step, stop_reason: StopReason = StopReason.TERMINATED
) -> Trajectory:
    spec = EpisodeSpec(
        episode_id=number,
        group_id=0,
        member=number,
        env=EnvSpec(id="x"),
        task="x",
        seed=0,
        policy_seed=0,
    )
    last = steps[-1]
    seen = np.concatenate([last.observation["prompt_tokens"], last.chunk.tokens])
    return Trajectory(
        episode=spec,
        steps=steps,
        final_observation={"prompt_tokens": seen},
        stop_reason=stop_reason,
    )


def chat(policy: CausalLanguageModel, number: int = 0) -> Trajectory:
    """Two turns that fit together: prompt 5 6 7, reply 20 21, heard 8 9, reply 22 23 24."""
    return episode(
        number,
        turn(policy, [5, 6, 7], [20, 21]),
        turn(policy, [5, 6, 7, 20, 21, 8, 9], [22, 23, 24]),
    )


def broken(policy: CausalLanguageModel, number: int = 0) -> Trajectory:
    """The same turns, but the second prompt writes the past in another way."""
    return episode(
        number, turn(policy, [5, 6, 7], [20, 21]), turn(policy, [5, 6, 7, 20, 8, 9], [22, 23, 24])
    )
