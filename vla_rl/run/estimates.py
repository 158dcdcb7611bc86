"""Estimates of a run before anything is allocated: the GPU memory of its update, and the seconds.

The policy's code is traced without computing (`learning.traced_pass`), which takes about as long as
one pass of a small policy; a 7B takes some seconds.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from vla_rl.learner.estimates.device import (
    GIB,
    CudaOverheads,
    GpuEstimate,
    Roofline,
    Workload,
    estimate_gpu,
    roofline,
)
from vla_rl.learner.estimates.rank_memory import PolicySize, measure_policy, rank_memory
from vla_rl.learner.estimates.traced_pass import Kept, TracedPass, trace_kept, trace_pass
from vla_rl.learner.flops import TERA, DevicePeak, find_device_peak
from vla_rl.learner.predictions import count_prefix_bytes
from vla_rl.models.example_inputs import example_row
from vla_rl.pipelines.config import (
    LearningConfig,
    MixedTrainingConfig,
    PlannerTrainingConfig,
    RunConfig,
    TextTrainingConfig,
)
from vla_rl.rollout import ChatLimits
from vla_rl.team.members import Member, Team

if TYPE_CHECKING:
    from vla_rl.models.example_inputs import ConversationSizes

LARGE_BYTES: Final = 10**8
"""Weights from which a policy is meant for a GPU."""

NOTHING_KEPT: Final = Kept(inside=(), inputs=(), outside=0, largest=0)


@dataclass(frozen=True)
class RunEstimate:
    """Costs of an update of one policy."""

    size: PolicySize
    traced: TracedPass
    recomputes: bool
    memory: GpuEstimate

    certain: GpuEstimate
    """The part of the memory that every run needs: all of it, but for a language policy, whose
    conversations may stay shorter than their limits. The images that they show are in it."""

    conversations: "ConversationSizes | None" = None
    """The longest conversations of a language policy."""

    @property
    def bytes_of_passes(self) -> int:
        """Return what an update needs besides weights, gradients and optimizer, whatever it computes on."""
        names = ("activations", "backward of a block", "keys and values", "kept prefixes")
        return sum(self.memory.terms.get(name, 0) for name in names)


def estimate_run(
    config: LearningConfig,
    team: Team,
    observation_tokens: int | None = None,
    observation_images: Sequence[tuple[int, int]] | None = None,
) -> RunEstimate | None:
    """Estimate the update of a run with one policy; None for teams and families that are not ours.

    Args:
        config: configuration of the run.
        team: its policies.
        observation_tokens: most tokens of a conversation that are not replies; None if not known.
        observation_images: height and width of each image of a conversation. None: those that the member
            shows.
    """
    if len(team.members) > 1:
        return None
    (member,) = team.members.values()
    if hasattr(member.model, "render"):
        images = member.shown_images if observation_images is None else tuple(observation_images)
        return _estimate_conversations(config, member, observation_tokens, images)
    row = example_row(member.model)
    if row is None:
        return None
    learner = member.learner or config.learner
    size = measure_policy(member.model, learner)
    traced = trace_pass(member.model, row.batch, row.tokens)
    memory = _memory_of_rows(config, member, traced.kept)
    return RunEstimate(size, traced, _recomputes(member), memory, certain=memory)


def certain_memory(config: LearningConfig, team: Team) -> GpuEstimate | None:
    """Return `RunEstimate.certain` alone, for which no long conversation and no backward pass is
    traced.
    """
    if len(team.members) > 1:
        return None
    (member,) = team.members.values()
    if hasattr(member.model, "render"):
        conversations = _find_longest(config, member, None, member.shown_images)
        return (
            None if conversations is None else _count_certain_bytes(config, member, conversations)
        )
    row = example_row(member.model)
    if row is None:
        return None
    return _memory_of_rows(config, member, trace_kept(member.model, row.batch, row.tokens))


def _memory_of_rows(config: LearningConfig, member: Member, kept: Kept) -> GpuEstimate:
    learner = member.learner or config.learner
    size = measure_policy(member.model, learner)
    copies = dict(_copies(config, size))
    prefixes = count_prefix_bytes(member.model, learner)
    if prefixes:
        copies["kept prefixes"] = prefixes
    return estimate_gpu(size, learner, kept, recomputes=_recomputes(member), copies=copies)


def _recomputes(member: Member) -> bool:
    return bool(getattr(member.model, "recomputes_activations", False))


def _estimate_conversations(
    config: LearningConfig,
    member: Member,
    observation_tokens: int | None,
    images: tuple[tuple[int, int], ...],
) -> RunEstimate | None:
    conversations = _find_longest(config, member, observation_tokens, images)
    if conversations is None:
        return None
    from vla_rl.models.example_inputs import trace_conversations

    model: Any = member.model
    learner, engine = member.learner or config.learner, member.engine or config.engine
    size, traced = measure_policy(model, learner), trace_conversations(model, conversations)
    copies = dict(_copies(config, size))
    if engine.kind == "torch":
        slots = engine.max_batch + engine.kept_conversations
        copies["keys and values"] = slots * conversations.length * model.key_value_bytes()
    memory = estimate_gpu(size, learner, traced.kept, recomputes=False, rows=1, copies=copies)
    certain = _count_certain_bytes(config, member, conversations)
    return RunEstimate(size, traced, False, memory, certain, conversations)


def _find_longest(
    config: LearningConfig,
    member: Member,
    observation_tokens: int | None,
    images: tuple[tuple[int, int], ...],
) -> "ConversationSizes | None":
    """Return the longest conversations of a language policy; None if its family is not ours."""
    # imports transformers' language models, which no other run needs
    from vla_rl.models.example_inputs import longest_conversations
    from vla_rl.models.language import CausalLanguageModel

    if not isinstance(member.model, CausalLanguageModel):
        return None
    if isinstance(config, PlannerTrainingConfig):
        limits = config.planner.chat
    elif isinstance(config, TextTrainingConfig | MixedTrainingConfig):
        limits = config.chat
    else:
        limits = ChatLimits()
    return longest_conversations(
        member.model,
        member.engine or config.engine,
        member.learner or config.learner,
        max_turns=limits.max_turns,
        max_reply=limits.max_reply,
        max_tokens=limits.max_tokens,
        observation_tokens=observation_tokens,
        images=images,
    )


def _count_certain_bytes(
    config: LearningConfig, member: Member, conversations: "ConversationSizes"
) -> GpuEstimate:
    """Estimate what remains if all conversations stay short: the images that they show."""
    from vla_rl.models.example_inputs import shortest_conversations, trace_kept_conversations

    model: Any = member.model
    learner = member.learner or config.learner
    size, kept = measure_policy(model, learner), NOTHING_KEPT
    if conversations.images:
        episodes = config.scheduler.groups_per_update * config.episodes_per_group
        least = -(-min(learner.minibatch_trajectories or episodes, episodes) // learner.row_groups)
        rows = min(conversations.rows, least)
        kept = trace_kept_conversations(
            model, shortest_conversations(model, conversations.images, rows)
        )
    return estimate_gpu(size, learner, kept, recomputes=False, rows=1, copies=_copies(config, size))


def concerns_gpus(config: LearningConfig, team: Team) -> bool:
    """Return whether a plan should show GPU memory: there is a GPU, its peak is given, or the
    policies are too large for a CPU.

    Others are spared the trace, whose imports alone take a second.
    """
    weights, _ = team.memory_bytes
    is_wanted = config.run.device != "cpu" and torch.cuda.is_available()
    return is_wanted or config.run.peak_tflops is not None or weights >= LARGE_BYTES


def require_gpu_memory(config: LearningConfig, team: Team, device: torch.device) -> None:
    """Raise ConfigError with the inequality if a run's update does not fit what other programs leave
    of its GPU, before anything is allocated there.
    """
    if device.type != "cuda" or not _learns_locally(config.cluster.learners):
        return
    certain = certain_memory(config, team)
    if certain is not None:
        require_room(certain, device)


def require_room(certain: GpuEstimate, device: torch.device) -> None:
    """Raise ConfigError with the inequality if memory does not fit what other programs leave."""
    free, total = torch.cuda.mem_get_info(device)
    # a policy that was loaded onto the GPU, and the context that asking has opened, are in the estimate
    ours = torch.cuda.memory_reserved(device) + CudaOverheads().context
    available = min(free + ours, total)
    is_in_the_way = available < certain.total <= total
    certain.require_fit(
        available,
        remedy=f"other programs use {(total - available) / GIB:.1f} of its {total / GIB:.1f} GiB: "
        "end them (`nvidia-smi` lists them), or choose another GPU with CUDA_VISIBLE_DEVICES"
        if is_in_the_way
        else "",
    )


def _learns_locally(learners: Sequence[str]) -> bool:
    """Return whether the first GPU of this host learns."""
    if not learners:
        return True
    # imported here, because one host pays nothing for what several need
    from vla_rl.cluster.host_file import LOCAL_HOST
    from vla_rl.cluster.run_layout import find_learning_gpus

    return 0 in (find_learning_gpus(LOCAL_HOST, 1, learners) or ())


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
    learner, conversations = config.learner, estimate.conversations
    each = learner.minibatch_trajectories or episodes
    work = Workload(
        # a conversation is one row, which is generated token by token
        decisions=episodes * (num_chunks if conversations is None else 1),
        passes=1 if conversations is None else conversations.completion_tokens,
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
    known = None if device_name is None else find_device_peak(device_name)
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
