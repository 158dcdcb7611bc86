"""The examples of docs/algorithms.md, on a batch that is small enough to follow."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_batches import batch_of, gradient, row

from vla_rl.algorithms import RewardBatch
from vla_rl.algorithms.advantages import ADVANTAGE_PARAMETERS
from vla_rl.algorithms.aggregations import AGGREGATIONS
from vla_rl.algorithms.losses import PARAMETERS
from vla_rl.types import ActionChunk, EnvSpec, EpisodeSpec, Step, StopReason, Trajectory

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
BLOCKS = [block.split("```")[0] for block in PAGE.read_text().split("```python\n")[1:]]


def trajectory_of(episode_id: int, stop_reason: StopReason, num_steps: int = 1) -> Trajectory:
    chunk = ActionChunk(
        actions=np.zeros((1, 2), np.float32),
        tokens=np.zeros(2, np.int64),
        log_probs=np.zeros(2, np.float32),
        weight_version=0,
    )
    return Trajectory(
        episode=EpisodeSpec(
            episode_id=episode_id,
            group_id=0,
            member=episode_id,
            env=EnvSpec(id="toy"),
            task="t",
            seed=0,
            policy_seed=0,
        ),
        steps=tuple(
            Step(observation={}, chunk=chunk, rewards=np.zeros(1, np.float32))
            for _ in range(num_steps)
        ),
        final_observation={},
        stop_reason=stop_reason,
    )


def test_the_example_runs_as_written() -> None:
    log_prob = torch.zeros(3, 2, requires_grad=True)
    names: dict[str, Any] = {
        "trajectories": [
            trajectory_of(0, StopReason.SUCCESS),
            trajectory_of(1, StopReason.TIME_LIMIT),
        ],
        "mask": torch.tensor([[True, True], [True, True], [True, False]]),
        "trajectory_of_row": torch.arange(3),
        "log_prob": log_prob,
        "behavior_log_prob": torch.zeros(3, 2),
        "advantage_of_row": torch.tensor([1.0, 0.0, -1.0]),
        "micro_batches": [slice(0, 2), slice(2, 3)],
    }
    exec(compile(BLOCKS[0], str(PAGE), "exec"), names)
    np.testing.assert_allclose(
        np.concatenate(names["advantages"]), [0.5**0.5, -(0.5**0.5)], rtol=1e-5
    )
    # 3 trajectories; -A / (tokens of the trajectory) / 3
    assert log_prob.grad is not None
    torch.testing.assert_close(
        log_prob.grad, torch.tensor([[-1 / 6, -1 / 6], [0.0, 0.0], [1 / 3, 0.0]])
    )
    assert names["metrics"]["ratio_mean"] == 1.0


def test_functions_of_ones_own_run_as_written(import_folder) -> None:
    (import_folder / "my_rl.py").write_text(BLOCKS[1])
    names: dict[str, Any] = {}
    exec(compile(BLOCKS[2], str(PAGE), "exec"), names)
    import my_rl

    rewards = [
        my_rl.quick_success(trajectory_of(0, reason, 2))
        for reason in (StopReason.SUCCESS, StopReason.TIME_LIMIT)
    ]
    assert rewards == pytest.approx([0.99**2, 0.0])
    ranked = names["estimate"](
        RewardBatch(rewards=np.array([0.3, 5.0, 0.3]), group=np.array([0, 0, 0]))
    )
    assert ranked.per_trajectory() == [-0.5, 1.0, -0.5]
    # sqrt(4) = 2 is bounded at 1.5, sqrt(1.21) = 1.1 is not
    torch.testing.assert_close(
        gradient(names["loss"], batch_of((4.0, 1.21), (1.0, -1.0))), row(-1.5, 1.1)
    )


def test_a_td3_step_of_the_page_runs_as_written() -> None:
    state, action = torch.zeros(3, 2), torch.full((3, 4), 0.5)
    action_scale = torch.tensor(2.0, requires_grad=True)

    def critics(state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return torch.stack([action.sum(dim=1), 2.0 * action.sum(dim=1)])

    names: dict[str, Any] = {
        "rewards": torch.tensor([[0.0, 1.0]] * 3),
        "num_rewards": torch.tensor([2, 2, 1]),
        "terminated": torch.tensor([True, False, False]),
        "state": state,
        "next_state": state,
        "action": action,
        "reference": torch.zeros(3, 4),
        "intervened": torch.tensor([[False, False], [True, False], [False, False]]),
        "actor": lambda state: torch.full((3, 4), 0.1) * action_scale,
        "target_actor": lambda state: torch.full((3, 4), 0.9),
        "critics": critics,
        "target_critics": critics,
    }
    exec(compile(BLOCKS[3], str(PAGE), "exec"), names)
    # 0.97 at the success; 0.97 + 0.97^2 V and 0.97 V, where V is above 1: the bound holds
    torch.testing.assert_close(names["targets"], torch.tensor([0.97, 1.0, 1.0]))
    # actions of 0.2, values of 0.8; targets of 0, and of 0.5 in the first control step of row 1
    errors = (10 * 0.2**2 + 2 * 0.3**2) / 12
    assert names["actor_loss"].item() == pytest.approx(-0.5 * 0.8 + 2.8 * errors)
    names["actor_loss"].backward()
    assert action_scale.grad is not None


@pytest.mark.parametrize(
    "table",
    [PARAMETERS, ADVANTAGE_PARAMETERS, AGGREGATIONS],
    ids=["loss", "advantage", "aggregation"],
)
def test_everything_that_can_be_chosen_is_in_a_table_of_the_page(table) -> None:
    rows = {
        line.split("`")[1]: line for line in PAGE.read_text().splitlines() if line.startswith("| `")
    }
    assert set(table) <= set(rows)


def test_the_page_names_the_defaults_as_they_are() -> None:
    rows = {
        line.split("`")[1]: line for line in PAGE.read_text().splitlines() if line.startswith("| `")
    }
    for name, parameters in PARAMETERS.items():
        told = {
            field: float(value) for field, value in re.findall(r"`(\w+)` ([\d.e-]+)", rows[name])
        }
        if "PPO's" in rows[name]:
            told |= {
                field: value
                for field, value in PARAMETERS["ppo"].items()
                if isinstance(value, float)
            }
        assert told == {
            field: value for field, value in parameters.items() if isinstance(value, float)
        }, name


def test_every_golden_case_has_a_row_on_the_page_and_every_row_a_case() -> None:
    table = (
        PAGE.read_text()
        .split("## The same numbers as other systems")[1]
        .split("Different on purpose")[0]
    )
    named = {tuple(name.split(": ")) for name in re.findall(r"`(\w+: [^`]+)`", table)}
    folder = Path(__file__).parent / "golden"
    cases = {
        path.stem: set(json.loads(path.read_text())["cases"]) for path in folder.glob("*.json")
    }
    for project, start in named:
        assert any(case.startswith(start) for case in cases[project]), (project, start)
    for project, names in cases.items():
        starts = tuple(start for other, start in named if other == project)
        # where ours differs is a table of its own
        other_names = ("advantage/gpg", "advantage/grpo/lone", "correction/loss", "reinpp")
        assert {name for name in names if not name.startswith((*starts, *other_names))} == set()
