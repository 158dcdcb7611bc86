"""Every off-policy algorithm learns the one-decision task from the same 256 stored decisions."""

from pathlib import Path
from typing import get_args

import pytest
from head_learning import REWARDED_FROM, make_head, mean_action, opened_learner

from vla_rl.engines import DeviceLane
from vla_rl.learner.off_policy.config import (
    DEFAULTS,
    ENTROPIC,
    IMITATING,
    Algorithm,
    OffPolicyConfig,
    RampConfig,
)
from vla_rl.learner.off_policy.steps import STEPS


@pytest.mark.parametrize("algorithm", get_args(Algorithm))
async def test_every_algorithm_moves_the_head_to_what_is_rewarded(
    algorithm: Algorithm, tmp_path: Path
) -> None:
    # dsrl's actor steers; one of the others' is the chunk itself
    kind = "tokens" if algorithm == "dsrl" else "residual"
    policy = make_head(kind, learns_std=algorithm in ENTROPIC)
    before = mean_action(policy)
    ramp = {"bc": RampConfig(first=0.1, last=0.1), "q": RampConfig(first=1.0, last=1.0)}
    async with DeviceLane(1) as lane:
        with opened_learner(policy, lane, tmp_path, algorithm=algorithm, **ramp) as learner:
            report = await learner.learn_steps(200)
    after = mean_action(policy)
    rewarded = (before[:, 0] > REWARDED_FROM).mean(), (after[:, 0] > REWARDED_FROM).mean()
    assert rewarded[0] < 0.3
    assert rewarded[1] > 0.8
    assert report.weight_version == 1
    assert ("critic/q_mean" in report.metrics) == (algorithm not in IMITATING)
    if algorithm not in IMITATING:
        # 35 of 100 uniform actions are rewarded
        assert report.metrics["critic/target_mean"] == pytest.approx(0.35, abs=0.12)


def test_every_name_has_defaults_and_a_step() -> None:
    assert set(get_args(Algorithm)) == set(DEFAULTS) == set(STEPS)


def test_rlpd_has_ten_critics_two_of_which_bootstrap_and_half_demonstrations() -> None:
    config = OffPolicyConfig(algorithm="rlpd")
    assert (config.num_critics, config.target_critics) == (10, 2)
    assert (config.steps_per_decision, config.demonstrations) == (20.0, 0.5)


def test_a_ramp_goes_from_its_first_weight_to_its_last() -> None:
    ramp = RampConfig(first=2.0, last=1.0, begin=10, steps=10)
    assert [ramp.value_at(step) for step in (0, 10, 15, 20, 99)] == [2.0, 2.0, 1.5, 1.0, 1.0]
