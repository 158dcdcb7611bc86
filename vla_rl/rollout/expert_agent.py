"""The agent that lets an expert act at some decisions, and labels decisions with what the expert does.

    observe ─► policy's chunk ─► takeover? ── no ──► the policy's rows run ─┐
                                     └── yes ──► the expert's rows run ─────┴─► Step: intervened, expert_actions

DAgger mixes policy and expert by a coin (Ross et al. 2011, arXiv:1011.0686), so that labels come from states
that the policy visits. HG-DAgger takes over if the policy is stuck (Kelly et al. 2019, arXiv:1810.02890).

What a label is. Where the expert acted, the label is what it did, control step by control step: it is exact.
Where the policy acted, it depends on the expert. One that answers whole chunks, as a policy does and a scripted
one with `expert_rows`, is asked for its chunk, which is exact too. One that answers a control step at a time is
asked before each of the policy's control steps: row j of the label is what it would do in the state that the policy
has reached by then, not in the one that its own rows would have reached. Such labels are biased until
the policy does what the expert does; `labels="acted"` leaves them out.
"""

import random
from collections.abc import Callable
from typing import ClassVar, Final, Literal, Protocol

import msgspec
import numpy as np

from vla_rl.errors import AgentError
from vla_rl.rollout.agents import copy_arrays, copy_chunk, stop_reason
from vla_rl.rollout.experts import Expert, SuggestedExpert, ask_expert, remove_suggestion
from vla_rl.types import (
    ActionChunk,
    Agent,
    ChunkOutcome,
    Config,
    Env,
    EpisodeSpec,
    Observation,
    Policy,
    PositiveFloat,
    PositiveInt,
    ReadIf,
    Share,
    Step,
    Trajectory,
    derive_seed,
)

STATE_KEY: Final = "state"


class InterventionConfig(Config, frozen=True, kw_only=True):
    """When an expert acts instead of the policy, and which decisions it labels."""

    READ_IF: ClassVar[tuple[ReadIf, ...]] = (
        ReadIf(("beta", "beta_decay"), "takeover", ("coin",)),
        ReadIf(("patience", "min_move", "latest", "hold"), "takeover", ("stall",)),
    )

    takeover: Literal["coin", "stall"] = "coin"
    """coin: the expert acts at random decisions (DAgger). stall: it takes over if the policy makes no progress
    (HG-DAgger)."""

    beta: Share = 0.5
    """Probability that the expert acts, drawn for each decision. 0 only labels; 1 shows the expert alone."""

    alone: Share = 0.0
    """Share of episodes that the policy runs alone. Where it succeeds they have no labels, and tell a learner what
    to keep; a success that an expert helped with says nothing about the policy's own decisions in it."""

    beta_decay: Share = 1.0
    """Factor of `beta` for each update, so that later episodes are the policy's own. 1: it stays."""

    patience: PositiveInt = 3
    """Decisions without progress after which the expert takes over."""

    min_move: PositiveFloat = 0.01
    """Smallest change of any number of the observation's `state` over these decisions that counts as progress;
    LIBERO's first three are metres."""

    latest: PositiveInt | None = None
    """Number of the decision from which on the expert acts to the end, counted from 0, because a policy that
    succeeds has done so by then. None: there is none."""

    hold: PositiveInt = 4
    """Decisions for which the expert keeps control after it took over."""

    labels: Literal["every", "acted"] = "every"
    """every: all decisions are labelled; those of the policy on its own path, which is biased, if the expert
    answers one control step at a time. acted: those of the expert alone."""

    timeout_s: PositiveFloat | None = 60.0
    """Most seconds for an answer of the expert; then the episode is run again. None: no limit."""


class Takeover(Protocol):
    """Decides who acts, in one episode."""

    def wants_control(self, decision: int, observation: Observation, chunk: ActionChunk) -> bool:
        """Return whether the expert acts.

        Args:
            decision: its number in the episode, from 0 on; asked once for each, in order.
            observation: what the policy saw.
            chunk: what the policy would do.
        """
        ...


class CoinTakeover:
    """Lets the expert act by a coin, which depends on the episode's seed and the decision alone."""

    def __init__(self, config: InterventionConfig, episode: EpisodeSpec) -> None:
        self._config, self._episode = config, episode

    def wants_control(self, decision: int, observation: Observation, chunk: ActionChunk) -> bool:
        """Throw the coin; its probability falls with the updates of the weights that decided."""
        beta = self._config.beta * self._config.beta_decay**chunk.weight_version
        return _throw_coin(self._episode, "expert", decision) < beta


def _throw_coin(episode: EpisodeSpec, *purpose: str | int) -> float:
    return random.Random(derive_seed(episode.policy_seed, *purpose)).random()


class _NoTakeover:
    """Leaves every decision to the policy."""

    def wants_control(self, decision: int, observation: Observation, chunk: ActionChunk) -> bool:
        return False


class StallTakeover:
    """Lets the expert act for some decisions if the robot has hardly moved, or it is late."""

    def __init__(self, config: InterventionConfig) -> None:
        self._config = config
        self._states: list[np.ndarray] = []
        self._held_until = 0

    def wants_control(self, decision: int, observation: Observation, chunk: ActionChunk) -> bool:
        """Compare the robot's state with those of the decisions before.

        Raises: AgentError for an observation without `state`.
        """
        config = self._config
        state = observation.get(STATE_KEY)
        if not isinstance(state, np.ndarray):
            raise AgentError(
                f"the observation has {sorted(observation)}, expected {STATE_KEY!r}, by which a stall is seen; "
                'use takeover="coin"'
            )
        if config.latest is not None and decision >= config.latest:
            return True
        if decision < self._held_until:
            return True
        self._states.append(np.array(state))
        recent = self._states[-config.patience - 1 :]
        if len(recent) <= config.patience or np.ptp(recent, axis=0).max() >= config.min_move:
            return False
        # what the expert does next is its own progress: the policy starts anew after it
        self._states.clear()
        self._held_until = decision + config.hold
        return True


MakeTakeover = Callable[[EpisodeSpec], Takeover]


async def expert_agent(
    env: Env, policy: Policy, *, intervention: InterventionConfig | None = None
) -> Trajectory:
    """Run one episode with the scripted expert of an environment `vla_rl/<suite>-expert-v0`.

    `functools.partial(expert_agent, intervention=InterventionConfig(beta=0.3))` is an agent that other hosts can
    import.

    Raises: as `make_expert_agent`.
    """
    return await make_expert_agent(SuggestedExpert(), intervention)(env, policy)


def make_expert_agent(
    expert: Expert,
    intervention: InterventionConfig | None = None,
    make_takeover: MakeTakeover | None = None,
) -> Agent:
    """Return an agent that lets `expert` act at some decisions.

    Every control step counts, those of the expert too. `info["expert_steps"]` of an episode is their number.

    Args:
        expert: asked with the environment's observations.
        intervention: when it acts, and what is labelled.
        make_takeover: makes what decides who acts, for each episode; None: by `intervention`. A person who takes
            over whenever they want is one.

    Raises: by the agent: ExpertFailed, AgentError; see `ask_expert`.
    """
    config = intervention or InterventionConfig()

    async def run_agent(env: Env, policy: Policy) -> Trajectory:
        if _throw_coin(env.episode, "alone") < config.alone:
            return _keep_own_successes(
                await _run_episode(env, policy, expert, _NoTakeover(), config)
            )
        takeover = (
            make_takeover(env.episode) if make_takeover else _make_takeover(config, env.episode)
        )
        return await _run_episode(env, policy, expert, takeover, config)

    return run_agent


def _keep_own_successes(trajectory: Trajectory) -> Trajectory:
    """Return an episode that the policy ran alone, without labels if it succeeded."""
    if not trajectory.is_success:
        return trajectory
    steps = (msgspec.structs.replace(step, expert_actions=None) for step in trajectory.steps)
    return msgspec.structs.replace(trajectory, steps=tuple(steps))


def _make_takeover(config: InterventionConfig, episode: EpisodeSpec) -> Takeover:
    return CoinTakeover(config, episode) if config.takeover == "coin" else StallTakeover(config)


async def _run_episode(
    env: Env, policy: Policy, expert: Expert, takeover: Takeover, config: InterventionConfig
) -> Trajectory:
    observation, _ = await env.reset()
    steps: list[Step] = []
    num_expert = 0
    while True:
        observed = copy_arrays(observation)
        seen = remove_suggestion(observed)
        # the policy is asked even where the expert acts: what it read and drew is half of a training example
        chunk = copy_chunk(await policy.act(seen))
        is_expert = takeover.wants_control(len(steps), seen, chunk)
        if is_expert or config.labels == "every":
            ran = await _run_labelled(
                env, expert, observed, chunk.actions, is_expert, config.timeout_s
            )
        else:
            ran = _Ran(await env.step_chunk(chunk.actions), chunk.actions, None)
        outcome = ran.outcome
        steps.append(
            Step(
                observation=seen,
                chunk=msgspec.structs.replace(chunk, actions=ran.actions),
                rewards=np.array(outcome.rewards),
                intervened=np.full(len(outcome.rewards), is_expert),
                expert_actions=ran.labels,
            )
        )
        num_expert += steps[-1].num_executed if is_expert else 0
        if outcome.terminated or outcome.truncated:
            return Trajectory(
                episode=env.episode,
                steps=tuple(steps),
                final_observation=remove_suggestion(copy_arrays(outcome.observation)),
                stop_reason=stop_reason(outcome.terminated, outcome.info),
                info={**copy_arrays(outcome.info), "expert_steps": num_expert},
            )
        observation = outcome.observation


class _Ran(msgspec.Struct, frozen=True):
    """One decision that ran: its outcome, actions float32 [H, D], and labels of the same shape or None."""

    outcome: ChunkOutcome
    actions: np.ndarray
    labels: np.ndarray | None


async def _run_labelled(
    env: Env,
    expert: Expert,
    observed: Observation,
    proposed: np.ndarray,
    is_expert: bool,
    timeout_s: float | None,
) -> _Ran:
    """Run one decision, asking the expert as often as its answers end."""
    horizon, size = proposed.shape
    labels: list[np.ndarray] = []
    rewards: list[np.ndarray] = []
    num_run = 0
    while True:
        answer = (await ask_expert(expert, observed, size, timeout_s))[: horizon - num_run]
        rows = answer if is_expert else proposed[num_run : num_run + len(answer)]
        outcome = await env.step_chunk(rows)
        labels.append(answer)
        rewards.append(np.array(outcome.rewards))
        num_run += len(rows)
        if outcome.terminated or outcome.truncated or num_run == horizon:
            break
        observed = outcome.observation
    label = np.concatenate(labels)
    # behind the end of an episode nothing is known; its last row is the nearest guess
    label = np.concatenate([label, np.repeat(label[-1:], horizon - len(label), axis=0)])
    whole = msgspec.structs.replace(outcome, rewards=np.concatenate(rewards))
    return _Ran(whole, label if is_expert else proposed, label)
