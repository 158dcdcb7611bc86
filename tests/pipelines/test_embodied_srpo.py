"""Which successes the failures of an update are compared with."""

import msgspec
import numpy as np
from small_episodes import trajectory

from vla_rl.algorithms import ReferenceBank, SrpoConfig
from vla_rl.graph import NodeOutput
from vla_rl.pipelines.embodied_srpo import reward_by_progress
from vla_rl.types import Group, StopReason

FAR, NEAR, NEARER = ([[place]] for place in (9.0, 1.0, 0.5))
GOAL = [[0.0]]


def group(number: int, *solved: bool) -> Group:
    members = []
    for member, success in enumerate(solved):
        stop = StopReason.SUCCESS if success else StopReason.TERMINATED
        made = trajectory([[0.0]], member, stop, {"is_success": success, "score": {"total": 0.5}})
        spec = msgspec.structs.replace(
            made.episode, group_id=number, episode_id=10 * number + member
        )
        members.append(msgspec.structs.replace(made, episode=spec))
    return Group(group_id=number, trajectories=tuple(members), dispatch_version=0)


GROUPS = [group(0, True, False, False), group(1, False, False)]
EMBEDDINGS = [np.array([GOAL, NEAR, FAR], np.float32), np.array([NEARER, FAR], np.float32)]


async def rewarded(config: SrpoConfig, bank: ReferenceBank) -> tuple[list[list[float]], NodeOutput]:
    output = await reward_by_progress(0, GROUPS, EMBEDDINGS, config, bank)
    return [[float(each.sum()) for each in of_group] for of_group in output.batch], output


async def test_failures_are_compared_with_the_successes_of_all_groups_of_their_task() -> None:
    bank = ReferenceBank(4)
    ((success, near, far), (nearer, other_far)), _ = await rewarded(SrpoConfig(), bank)
    assert success == 1.0
    assert nearer > near > far == other_far > 0.0
    assert list(bank.state()) == ["none"]


async def test_failures_are_compared_with_the_successes_of_their_own_group_if_asked() -> None:
    bank = ReferenceBank(0)
    ((success, near, far), without), _ = await rewarded(SrpoConfig(references="group"), bank)
    assert success == 1.0 > near > far
    assert without == [0.0, 0.0]  # its group has no success
    assert bank.state() == {}


async def test_the_parts_of_an_environments_score_are_metrics_of_srpo_too() -> None:
    _, output = await rewarded(SrpoConfig(), ReferenceBank(4))
    assert output.metrics["score/total"] == 0.5
    assert output.metrics["reward/success_rate"] == 0.2
