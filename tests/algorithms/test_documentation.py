"""The example of docs/algorithms.md, on a batch that is small enough to follow."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vla_rl.types import ActionChunk, EnvSpec, EpisodeSpec, Step, StopReason, Trajectory

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"


def trajectory_of(episode_id: int, brightness: int) -> Trajectory:
    observation = {"image": np.full((32, 32, 3), brightness, np.uint8)}
    chunk = ActionChunk(
        actions=np.zeros((1, 2), np.float32),
        tokens=np.zeros(2, np.int64),
        log_probs=np.zeros(2, np.float32),
        weight_version=0,
    )
    return Trajectory(
        episode=EpisodeSpec(
            episode_id=episode_id, group_id=0, member=episode_id, env=EnvSpec(id="toy"), task="t", seed=0, policy_seed=0
        ),
        steps=(Step(observation=observation, chunk=chunk, rewards=np.zeros(1, np.float32)),),
        final_observation=observation,
        stop_reason=StopReason.TIME_LIMIT,
    )


def test_the_example_runs_as_written() -> None:
    code = PAGE.read_text().split("```python\n")[1].split("```")[0]
    log_prob = torch.zeros(3, 2, requires_grad=True)
    names: dict[str, Any] = {
        "trajectories": [trajectory_of(0, 200), trajectory_of(1, 180), trajectory_of(2, 20)],
        "is_success": np.array([True, False, False]),
        "tasks": ["t"] * 3,
        "members_of_a_group": [0, 1, 2],
        "mask": torch.tensor([[True, True], [True, True], [True, False]]),
        "trajectory_of_row": torch.arange(3),
        "log_prob": log_prob,
        "behavior_log_prob": torch.zeros(3, 2),
        "advantage_of_row": torch.tensor([1.0, 0.0, -1.0]),
        "micro_batches": [slice(0, 2), slice(2, 3)],
    }
    exec(compile(code, str(PAGE), "exec"), names)
    assert names["rewards"][0] == 1.0
    assert names["rewards"][1] > names["rewards"][2]
    assert names["advantage"].sum() == pytest.approx(0.0, abs=1e-6)
    # 3 trajectories; -A / (tokens of the trajectory) / 3
    assert log_prob.grad is not None
    torch.testing.assert_close(log_prob.grad, torch.tensor([[-1 / 6, -1 / 6], [0.0, 0.0], [1 / 3, 0.0]]))
