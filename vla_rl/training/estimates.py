"""Estimates of a run before anything is allocated: the GPU memory of its update, and the seconds.

The policy's code is traced without computing (`learning.traced_pass`), which takes about as long as
one pass of a small policy; a 7B takes some seconds.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from vla_rl.engines.peaks import TERA, DevicePeak, peak_of
from vla_rl.learning.gpu_memory import GpuEstimate, estimate_gpu
from vla_rl.learning.rank_memory import PolicySize, rank_memory, size_of
from vla_rl.learning.roofline import Roofline, Workload, roofline
from vla_rl.learning.traced_pass import TracedPass, trace_pass
from vla_rl.models.example_rows import example_row
from vla_rl.pipelines.config import LearningConfig, RunConfig
from vla_rl.training.team import Team

LARGE_BYTES: Final = 10**8
"""Weights from which a policy is meant for a GPU."""


@dataclass(frozen=True)
class RunEstimate:
    """Costs of an update of one policy."""

    size: PolicySize
    traced: TracedPass
    recomputes: bool
    memory: GpuEstimate


def estimate_run(config: LearningConfig, team: Team) -> RunEstimate | None:
    """Estimate the update of a run with one policy; None for teams and policies without an example
    row (language policies, whose lengths are not known beforehand).
    """
    if len(team.members) > 1:
        return None
    (member,) = team.members.values()
    row = example_row(member.model)
    if row is None:
        return None
    learner, size = member.learner or config.learner, size_of(member.model.network)
    traced = trace_pass(member.model, row.batch, row.tokens)
    recomputes = bool(getattr(member.model, "recomputes_activations", False))
    memory = estimate_gpu(
        size, learner, traced.kept, recomputes=recomputes, copies=_copies(config, size)
    )
    return RunEstimate(size, traced, recomputes, memory)


def concerns_gpus(config: LearningConfig, team: Team) -> bool:
    """Return whether a plan should show GPU memory: there is a GPU, its peak is given, or the
    policies are too large for a CPU.

    Others are spared the trace, whose imports alone take a second.
    """
    weights, _ = team.num_bytes
    is_wanted = config.run.device != "cpu" and torch.cuda.is_available()
    return is_wanted or config.run.peak_tflops is not None or weights >= LARGE_BYTES


def require_gpu_memory(config: LearningConfig, team: Team, device: torch.device) -> None:
    """Raise ConfigError with the inequality if a run's update does not fit its GPU, before gradients
    and the optimizer's state are allocated.
    """
    if device.type != "cuda":
        return
    estimate = estimate_run(config, team)
    if estimate is not None:
        estimate.memory.require_fit(torch.cuda.get_device_properties(device).total_memory)


def seconds_of_update(
    config: LearningConfig,
    estimate: RunEstimate,
    peak: DevicePeak,
    *,
    num_chunks: int,
    decision_s: float | None,
) -> Roofline:
    """Return the least seconds of an update whose episodes are all as long as possible."""
    episodes = config.scheduler.groups_per_update * config.episodes_per_group
    learner = config.learner
    each = learner.minibatch_trajectories or episodes
    work = Workload(
        decisions=episodes * num_chunks,
        epochs=learner.epochs,
        steps=-(-episodes // each) * learner.epochs,
        acting_rows=max(config.num_envs // 2, 1),
        recomputes=estimate.recomputes,
        ranks=learner.ranks,
        simulator_s=decision_s,
        cores=min(os.cpu_count() or 1, config.num_envs),
        overlaps=config.scheduler.max_staleness > 0,
    )
    return roofline(estimate.traced, estimate.size, work, peak)


def peak_of_run(config: RunConfig, device_name: str | None) -> DevicePeak | None:
    """Return the peak that is given, or the named device's; None if neither is known."""
    known = None if device_name is None else peak_of(device_name)
    if config.peak_tflops is None:
        return known
    return DevicePeak(config.peak_tflops * TERA, known.bytes_per_s if known else None)


def device_name(device: torch.device) -> str | None:
    """Return a GPU's name; None for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def _copies(config: LearningConfig, size: PolicySize) -> Mapping[str, int]:
    """Return other weights on the learner's GPU. A critic's are unknown until it is built."""
    copies = {}
    shares = config.learner.steps_once_per_update and config.learner.ranks == 1
    if config.engine.kind == "torch" and not shares:
        copies["weights that act"] = size.weight_bytes
    if config.learner.loss.needs_reference or config.kl_in_reward.coef > 0.0:
        learner = config.learner
        copies["the reference policy"] = rank_memory(size, learner, has_reference=True).reference
    if config.learner.ranks > 1 and config.advantage.needs_values:
        copies["the critic"] = rank_memory(size, config.learner, critic=config.critic).critic
    return copies
