"""The choice of the way that pictures go: to the learner's ranks directly, or through this process.

Directly, if the ranks alone read them. All else that could read a picture here is named in this file.
"""

from collections.abc import Callable
from typing import Any, Final

from vla_rl.engines import LanguageModel
from vla_rl.graph import TaskGraph
from vla_rl.pipelines.config import LearningConfig
from vla_rl.pipelines.embodied_srpo import embed_group, reward_by_progress
from vla_rl.pipelines.nodes.advantages import CriticAdvantage, GroupAdvantage
from vla_rl.pipelines.nodes.ends import Collect, Learn, Show
from vla_rl.pipelines.nodes.judging import JudgeValues, LearnValues, ReferenceLogProbs
from vla_rl.pipelines.nodes.penalties import KlPenalty, OverlongPenalty
from vla_rl.pipelines.nodes.rewards import GroupReward
from vla_rl.remote_rollout.host_rollout import HostRollout
from vla_rl.remote_rollout.picture_routes import PictureRoutes
from vla_rl.team.members import Team

BLIND: Final = (
    Collect,
    CriticAdvantage,
    GroupAdvantage,
    JudgeValues,
    KlPenalty,
    Learn,
    LearnValues,
    OverlongPenalty,
    ReferenceLogProbs,
    Show,
)
"""Node functions that get groups, and leave pictures to the ranks, or to the process that has them."""


def choose_picture_way(
    config: LearningConfig, graph: TaskGraph, team: Team, hosts: HostRollout
) -> None:
    """Let pictures go to the learner's ranks directly, if nothing in this process reads them."""
    learners = [member.learner or config.learner for member in team.members.values()]
    if all(learner.ranks == 1 for learner in learners):
        return
    reader = _reader(graph, team, hosts)
    if config.cluster.depot_gib == 0:
        reader = "with cluster.depot_gib = 0, whole episodes come here"
    if reader:
        hosts.picture_way = f"pictures go through this process: {reader}"
        return
    hosts.pictures = PictureRoutes(round(config.cluster.depot_gib * (1 << 30)))
    hosts.picture_way = "pictures go from the hosts to the learner ranks directly"


def _reader(graph: TaskGraph, team: Team, hosts: HostRollout) -> str:
    """Return what reads pictures here, in words; empty if nothing does."""
    if any(isinstance(member.model, LanguageModel) for member in team.members.values()):
        return "those of conversations are compared here"
    nodes = graph.nodes.values()
    collected = {name for node in nodes if isinstance(node.func, Collect) for name in node.writes}
    if not collected:
        return "the pipeline collects episodes in a way of its own"
    for node in nodes:
        if collected & set(node.reads.values()) and not _is_blind(node.func, hosts):
            return f"the node {node.id!r} may read them"
    return ""


def _is_blind(function: Callable[..., Any] | str, hosts: HostRollout) -> bool:
    if type(function) is GroupReward:
        return not function.may_read_pictures
    if function is embed_group:
        return hosts.embeds
    return function is reward_by_progress or type(function) in BLIND
