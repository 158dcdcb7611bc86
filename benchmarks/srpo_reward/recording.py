"""Record the study's episodes: experts, experts that fail in known ways, and a half-trained policy.

True progress of a moment, from the simulator's hidden state, for picking an object up and putting
it somewhere:

    progress = 0.3 reach + 0.1 lift + 0.6 transport         each clipped to [0, 1]; 1 where the goal holds
    reach      1 - |hand - object| / |hand - object at the start|
    lift       height of the object above its start / 5 cm
    transport  1 - |object - goal| / |object - goal at the start|, horizontally
"""

from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

from benchmarks.srpo_reward.episodes import STEPS_PER_MOMENT, Episode
from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine
from vla_rl.envs.experts import CorrelatedNoise
from vla_rl.envs.libero import LiberoEnv
from vla_rl.envs.libero.env import IDLE_ACTION
from vla_rl.envs.libero.experts import Expert
from vla_rl.evaluation.scenes import resolve_checkpoint
from vla_rl.models.openvla_oft import OpenVlaOft
from vla_rl.models.shipped import SHIPPED
from vla_rl.types import Observation, Sampling, derive_seed

SUITE, STEP_LIMIT, IMAGE_SIZE = "libero_object", 160, 84
INIT_STATES, POLICY_INIT_STATES, POLICY_SAMPLES = range(3), range(10, 14), 6

Actor: TypeAlias = Callable[[int, Observation], Awaitable[np.ndarray]]
"""Called as `await actor(num_steps, observation)`; returns the next control steps, float32 [H,
7]."""


class Recording(NamedTuple):
    """The tasks of libero_object that are recorded, and the seed of noise, flaws and samples."""

    scripted_tasks: tuple[int, ...]
    policy_task: int
    seed: int


class Flaw(NamedTuple):
    """The flaw of an expert's episode."""

    kind: str
    noise: float = 0.0
    speed: float = 1.0

    between: tuple[float, float] = (2.0, 2.0)
    """Range of the true progress at which the flaw starts, drawn uniformly; 2 means never."""


GROUP = (
    Flaw("expert"),
    Flaw("expert", noise=0.25, speed=0.85),
    Flaw("expert", noise=0.25, speed=0.75),
    Flaw("stalled", noise=0.15, between=(0.05, 0.3)),
    Flaw("stalled", noise=0.15, speed=0.85, between=(0.4, 0.9)),
    Flaw("dropped", noise=0.15, between=(0.45, 0.8)),
    Flaw("empty", noise=0.15, between=(0.0, 0.0)),
    Flaw("lost", noise=0.15, between=(0.05, 0.9)),
)
"""The members of one group: three that succeed and five that fail. A flawed episode that still
succeeds counts as a success."""


class TrueProgress:
    """Reads the hidden state of one episode; make it right after the reset."""

    def __init__(self, env: LiberoEnv) -> None:
        self._scene = env.scene
        hand, thing, goal = self._positions()
        self._reach_m = float(np.linalg.norm(hand - thing))
        self._height_m = float(thing[2])
        self._transport_m = float(np.linalg.norm((thing - goal)[:2]))

    def now(self) -> float:
        """Return the progress at this moment, in [0, 1]."""
        hand, thing, goal = self._positions()
        reach = 1.0 - np.linalg.norm(hand - thing) / self._reach_m
        lift = (thing[2] - self._height_m) / 0.05
        transport = 1.0 - np.linalg.norm((thing - goal)[:2]) / self._transport_m
        return float(np.clip([reach, lift, transport], 0.0, 1.0) @ (0.3, 0.1, 0.6))

    def _positions(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the point between the fingers, the target's origin and the middle of its goal, in
        world coordinates (m).
        """
        data, domain = self._scene.data, self._scene.domain
        thing = data.xpos[domain.obj_body_id[domain.obj_of_interest[0]]]
        return (
            data.site("gripper0_grip_site").xpos.copy(),
            thing.copy(),
            data.site("basket_1_contain_region").xpos.copy(),
        )


class FlawedExpert:
    """The scripted expert, which fails in one known way from one point of its progress on."""

    def __init__(
        self, env: LiberoEnv, flaw: Flaw, rng: np.random.Generator, progress: TrueProgress
    ) -> None:
        self._expert, self._flaw, self._rng, self._progress = Expert(env.scene), flaw, rng, progress
        self._noise = CorrelatedNoise(flaw.noise, rng)
        self._goes_wrong_at, self._is_wrong = rng.uniform(*flaw.between), False
        self._drift, self._gripper = np.zeros(6), -1.0

    async def __call__(self, _num_steps: int, _observation: Observation) -> np.ndarray:
        """Return one control step."""
        self._is_wrong = self._is_wrong or self._progress.now() >= self._goes_wrong_at
        if self._is_wrong and self._flaw.kind == "stalled":
            return np.array([[*IDLE_ACTION[:6], self._gripper]], np.float32)
        if self._is_wrong and self._flaw.kind == "lost":
            self._drift = 0.9 * self._drift + 0.25 * self._rng.standard_normal(6) * (
                [1.0] * 3 + [0.2] * 3
            )
            return np.clip([[*self._drift, self._gripper]], -1.0, 1.0).astype(np.float32)
        action = self._noise.perturbed(self._expert.act())
        action[:6] *= self._flaw.speed
        if self._is_wrong:  # dropped or empty: the fingers stay open
            action[6] = -1.0
        self._gripper = float(action[6])
        return action[None]


class SampledPolicy:
    """The half-trained policy, acting as in training: at temperature 1, a whole chunk at a time."""

    def __init__(self, engine: TorchActionEngine, seed: int) -> None:
        self._engine, self._seed = engine, seed

    async def __call__(self, num_steps: int, observation: Observation) -> np.ndarray:
        """Return one action chunk."""
        sampling = Sampling(temperature=1.0, seed=derive_seed(self._seed, num_steps))
        return (await self._engine.act(observation, sampling)).actions


async def record_episode(
    env: LiberoEnv, init_state_id: int, kind: str, begin: Callable[[TrueProgress], Actor]
) -> Episode:
    """Run one episode; the environment runs in this thread, which owns its OpenGL context."""
    observation, _ = env.reset(options={"init_state_id": init_state_id})
    progress, num_steps = TrueProgress(env), 0
    choose_actions = begin(progress)
    moments = [(observation, progress.now())]
    terminated = truncated = False
    while not (terminated or truncated):
        for action in await choose_actions(num_steps, observation):
            num_steps += 1
            env.render_every_step = num_steps % STEPS_PER_MOMENT == 0
            observation, _, terminated, truncated, _ = env.step(action)
            if env.render_every_step or terminated or truncated:
                moments.append((observation, 1.0 if terminated else progress.now()))
            if terminated or truncated:
                break
    return Episode(
        task=env.task.key,
        init_state_id=init_state_id,
        kind=kind,
        is_success=terminated,
        frames=np.stack([seen["image"] for seen, _ in moments]),
        states=np.stack([seen["state"] for seen, _ in moments]),
        progress=np.array([value for _, value in moments], np.float32),
    )


async def record(
    recording: Recording, on_episode: Callable[[Episode], None], assets: str | None = None
) -> list[Episode]:
    """Run every episode of the study, and call `on_episode` after each."""
    episodes: list[Episode] = []
    seed = recording.seed

    def add(episode: Episode) -> None:
        episodes.append(episode)
        on_episode(episode)

    model = OpenVlaOft.load(resolve_checkpoint(SHIPPED, assets))
    with closing(_env(recording.policy_task, assets, wrist_image=True)) as env:
        async with (
            DeviceLane(1) as lane,
            TorchActionEngine(model, lane, EngineConfig(max_wait_s=0.0)) as engine,
        ):
            for init_state_id in POLICY_INIT_STATES:
                for member in range(POLICY_SAMPLES):
                    policy = SampledPolicy(engine, derive_seed(seed, init_state_id, member))
                    add(
                        await record_episode(
                            env, init_state_id, "policy", partial(_whatever_the_progress, policy)
                        )
                    )
    for task_id in recording.scripted_tasks:
        with closing(_env(task_id, assets, wrist_image=False)) as env:
            for init_state_id in INIT_STATES:
                for member, flaw in enumerate(GROUP):
                    rng = np.random.default_rng(derive_seed(seed, task_id, init_state_id, member))
                    begin = partial(FlawedExpert, env, flaw, rng)
                    add(await record_episode(env, init_state_id, flaw.kind, begin))
    return episodes


def _whatever_the_progress(choose: Actor, _progress: TrueProgress) -> Actor:
    return choose


def _env(task_id: int, assets: str | None, wrist_image: bool) -> LiberoEnv:
    return LiberoEnv(
        SUITE,
        task_id,
        assets,
        image_size=IMAGE_SIZE,
        step_limit=STEP_LIMIT,
        wrist_image=wrist_image,
        physics="fast",
        quality="fast",
    )
