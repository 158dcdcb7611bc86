"""Implementations that each break one rule, with the test that has to find it.

`test_contract_rules.py` runs this file. Without a fault, each implementation keeps all rules.
"""

import asyncio
import dataclasses
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import gymnasium
import msgspec
import numpy as np
import torch
from small_policies import completing_policy, observe, token_policy

from vla_rl.actors import Actor
from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine, TorchChatEngine
from vla_rl.envs.toy import ToyReachEnv
from vla_rl.errors import ContextOverflow
from vla_rl.models.mlp import MlpConfig, MlpPolicy
from vla_rl.testing import (
    ActionEngineContract,
    ActorContract,
    ChatEngineContract,
    EmbodiedEnvContract,
    PolicyContract,
)
from vla_rl.types import EnvSpec, Sampling

HOME_PID = "BROKEN_CONTRACTS_PID"
os.environ[HOME_PID] = os.environ.get(HOME_PID) or str(os.getpid())


class BrokenEnv(ToyReachEnv):
    shared = 0.0

    def __init__(self, fault: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.fault, self.num_resets = fault, 0
        self.render_every_step = fault != "frames_are_left_out"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if self.fault == "options_are_ignored":
            options = None
        if self.fault == "a_start_depends_on_the_seed" and options and "init_state_id" in options:
            super().reset(seed=options.pop("init_state_id"))
        self.num_resets += 1
        BrokenEnv.shared += 1.0
        observation, info = super().reset(seed=seed, options=options)
        return observation if self.fault == "reset_returns_no_info" else (observation, info)

    def step(self, action: np.ndarray) -> Any:
        if self.fault == "it_never_ends":
            self._is_over = False
        observation, reward, terminated, truncated, info = super().step(action)
        if self.fault == "an_observation_is_not_as_declared":
            observation = {**observation, "state": observation["state"][:1]}
        if self.fault == "rewards_depend_on_earlier_episodes":
            reward += self.num_resets
        if self.fault in ("instances_share_state", "neighbours_pay"):
            reward += BrokenEnv.shared
        if self.fault == "an_info_is_an_object":
            info["env"] = self
        if self.fault == "success_is_known_at_times" and self._num_steps == 2:
            del info["is_success"]
        if self.fault == "rewards_depend_on_drawing":
            reward += float(self.render_every_step)
        if self.fault == "another_process_pays_more":
            reward += float(os.environ[HOME_PID] != str(os.getpid()))
        if self.fault == "a_time_limit_terminates":
            terminated, truncated = terminated or truncated, False
        return observation, reward, terminated, truncated, info

    def set_state(self, state: dict[str, Any]) -> Any:
        if self.fault == "a_state_forgets_the_hand":
            state = {**state, "hand": np.zeros(2)}
        return super().set_state(state)


gymnasium.register(id="broken/reach-v0", entry_point=BrokenEnv)

ENV_FAULTS = {
    "reset_returns_no_info": "test_it_passes_gymnasiums_own_checker",
    "an_observation_is_not_as_declared": "test_every_observation_is_as_its_space_declares",
    "rewards_depend_on_earlier_episodes": "test_equal_seeds_and_actions_give_equal_episodes",
    "instances_share_state": "test_two_instances_run_equal_episodes",
    "an_info_is_an_object": "test_infos_can_be_sent_between_processes",
    "success_is_known_at_times": "test_success_is_known_in_every_step_or_in_none",
    "rewards_depend_on_drawing": "test_a_chunk_ends_where_its_single_steps_end",
    "a_state_forgets_the_hand": "test_a_state_restored_in_another_instance_goes_on_alike",
    "another_process_pays_more": "test_it_runs_the_same_episode_in_a_process_of_its_own",
    "neighbours_pay": "test_it_runs_the_same_episode_beside_another_in_one_process",
    "frames_are_left_out": "test_its_observations_have_an_image_a_state_and_an_instruction",
    "a_start_depends_on_the_seed": "test_an_init_state_is_the_same_start_whatever_the_seed",
    "options_are_ignored": "test_unknown_starts_are_refused",
    "a_time_limit_terminates": "test_the_time_limit_truncates_and_the_last_image_is_new",
    "it_never_ends": "test_a_step_outside_an_episode_is_refused",
}


class Envs(EmbodiedEnvContract):
    fault = ""

    def __init_subclass__(cls) -> None:
        kwargs = {"fault": cls.fault, "render_mode": "rgb_array"}
        cls.spec = EnvSpec(id="broken_contracts:broken/reach-v0", kwargs=kwargs)


class BrokenPolicy(MlpPolicy):
    fault = ""

    def prepare(self, observations: Any) -> Any:
        batch = super().prepare(observations)
        if self.fault == "rows_are_centred":
            batch = batch - batch.mean(0)
        if self.fault == "threads_share_a_buffer":
            self.buffer = batch
            time.sleep(0.01)
            self.calls = getattr(self, "calls", 0) + 1
            batch = self.buffer + (self.calls > 3)
        return batch

    def sample(self, batch: Any, samplings: Any) -> Any:
        if self.fault == "chance_is_global":
            torch.rand(1)
        if self.fault == "seeds_are_ignored":
            samplings = [msgspec.structs.replace(each, seed=7) for each in samplings]
        if self.fault == "greedy_is_ignored":
            samplings = [msgspec.structs.replace(each, greedy=False) for each in samplings]
        if self.fault == "means_are_sampled":
            samplings = [
                msgspec.structs.replace(each, greedy=each.greedy and not each.by_mean)
                for each in samplings
            ]
        sampled = super().sample(batch, samplings)
        if self.fault == "log_probs_are_double":
            return dataclasses.replace(sampled, log_probs=sampled.log_probs.double())
        return sampled

    def log_probs(self, batch: Any, tokens: Any, temperatures: Any) -> Any:
        if self.fault == "temperature_is_ignored":
            temperatures = torch.ones_like(temperatures)
        return super().log_probs(batch, tokens, temperatures)

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        actions = super().decode(tokens)
        return actions * 0.5 if self.fault == "decoding_halves" else actions

    def copy(self) -> Any:
        if self.fault == "a_copy_is_itself":
            return self
        copied = BrokenPolicy(self.config, super().copy().network)
        copied.fault = self.fault
        return copied

    def load_checkpoint_tensors(self, tensors: Any) -> None:
        if self.fault in ("nothing_is_loaded", "nothing_is_refused"):
            return
        super().load_checkpoint_tensors(tensors)

    @property
    def feature_size(self) -> int:
        return super().feature_size + (self.fault == "features_are_narrower")


POLICY_FAULTS = {
    "a_method_is_missing": "test_it_has_every_method_and_learns_what_it_acts",
    "temperature_is_ignored": "test_sampled_tokens_have_the_log_probs_that_were_reported",
    "log_probs_are_double": "test_sampled_tokens_have_the_log_probs_that_were_reported",
    "rows_are_centred": "test_a_row_does_not_depend_on_the_other_rows",
    "chance_is_global": "test_a_seed_is_all_the_chance_of_a_sample",
    "seeds_are_ignored": "test_a_seed_is_all_the_chance_of_a_sample",
    "greedy_is_ignored": "test_greedy_tokens_depend_on_no_seed",
    "means_are_sampled": "test_means_of_tokens_are_taken_or_refused",
    "decoding_halves": "test_actions_of_tokens_are_encoded_to_the_same_actions",
    "a_copy_is_itself": "test_a_copy_has_weights_of_its_own",
    "nothing_is_loaded": "test_checkpoint_tensors_bring_a_policy_back",
    "nothing_is_refused": "test_a_checkpoint_without_one_of_its_tensors_is_refused",
    "threads_share_a_buffer": "test_observations_are_prepared_in_any_thread",
    "features_are_narrower": "test_features_have_the_declared_width_and_a_gradient_reaches_them",
}


class Policies(PolicyContract):
    fault = ""

    def make_policy(self) -> Any:
        shape = MlpConfig(
            state_size=3, action_low=(-2.0,), action_high=(2.0,), num_bins=9, chunk_size=4
        )
        made = BrokenPolicy.create(shape, seed=0)
        with torch.no_grad():
            made.network.head.weight.mul_(100.0)  # further from the uniform that it begins with
        policy = BrokenPolicy(shape, made.network)
        policy.fault = self.fault
        if self.fault == "a_method_is_missing":
            return _Without(policy, "encode")
        return policy

    def make_observations(self) -> Any:
        rng = np.random.default_rng(0)
        return [{"state": rng.normal(size=3).astype(np.float32)} for _ in range(4)]


class _Without:
    """Another object without one of its attributes."""

    def __init__(self, whole: Any, name: str) -> None:
        self._whole, self._name = whole, name

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise AttributeError(name)
        return getattr(self._whole, name)


class BrokenEngine:
    """An engine around a sound one."""

    def __init__(self, engine: Any, lane: DeviceLane, fault: str) -> None:
        self.sound, self.lane, self.fault, self.asked = engine, lane, fault, 0
        self.is_stuck = False

    @property
    def weight_version(self) -> int:
        return int(self.sound.weight_version)

    async def hold_up(self) -> None:
        """Never answer again once a request was cancelled."""
        try:
            if self.is_stuck:
                raise RuntimeError("the engine answers nobody")
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.is_stuck = self.fault == "a_cancellation_breaks_it"
            raise

    def changed(self, sampling: Sampling) -> Sampling:
        self.asked += 1
        changes: dict[str, dict[str, Any]] = {
            "seeds_are_ignored": {"seed": self.asked},
            "temperature_is_ignored": {"temperature": 1.0},
            "greedy_is_ignored": {"greedy": False},
            "means_are_ignored": {"by_mean": False},
        }
        return msgspec.structs.replace(sampling, **changes.get(self.fault, {}))

    async def act(self, observation: Any, sampling: Sampling) -> Any:
        await self.hold_up()
        if self.fault == "an_error_breaks_it":
            self.is_stuck = sampling.temperature == 0.0
        chunk = await self.sound.act(observation, self.changed(sampling))
        changes: dict[str, dict[str, Any]] = {
            "it_names_the_next_version": {"weight_version": chunk.weight_version + 1},
            "log_probs_are_shifted": {"log_probs": chunk.log_probs - np.float32(0.01)},
            "actions_are_rounded": {"actions": chunk.actions.round(1)},
        }
        return msgspec.structs.replace(chunk, **changes.get(self.fault, {}))

    async def generate(self, prompt: Any, *, sampling: Any = None, **options: Any) -> Any:
        await self.hold_up()
        if self.fault == "tools_are_ignored":
            options["tools"] = ()
        if self.fault == "long_prompts_are_cut" and options.get("max_tokens") != 0:
            try:
                reply = await self.sound.generate(prompt, sampling=sampling, **options)
            except ContextOverflow:
                return None
        elif self.fault == "history_is_forgotten":
            reply = await self.sound.generate(prompt[-1:], sampling=sampling, **options)
        else:
            own = self.changed(sampling) if sampling else None
            reply = await self.sound.generate(prompt, sampling=own, **options)
        changes: dict[str, dict[str, Any]] = {
            "it_names_the_next_version": {"weight_versions": reply.weight_versions + 1},
            "log_probs_are_shifted": {"log_probs": reply.log_probs - np.float32(0.01)},
        }
        return msgspec.structs.replace(reply, **changes.get(self.fault, {}))

    def apply_weights(self, network: Any, version: int) -> None:
        old = self.sound.network if self.fault == "weights_are_not_applied" else network
        self.sound.apply_weights(old, version)


@asynccontextmanager
async def opened(kind: Any, policy: Any, fault: str) -> AsyncIterator[BrokenEngine]:
    async with (
        DeviceLane(1) as lane,
        kind(policy.copy(), lane, EngineConfig(max_reply=24)) as engine,
    ):
        yield BrokenEngine(engine, lane, fault)


ACTION_FAULTS = {
    "actions_are_rounded": "test_a_decision_is_a_chunk_with_its_tokens_log_probs_and_version",
    "temperature_is_ignored": "test_log_probs_are_those_of_the_learner_after_temperature",
    "log_probs_are_shifted": "test_log_probs_are_those_of_the_learner_after_temperature",
    "greedy_is_ignored": "test_greedy_takes_the_most_likely_tokens_and_scores_them_at_the_temperature",
    "means_are_ignored": "test_means_of_tokens_are_the_policys_own_or_refused",
    "seeds_are_ignored": "test_the_same_seed_gives_the_same_chunk_whoever_is_asked_beside_it",
    "an_error_breaks_it": "test_a_sampling_that_is_none_fails_its_caller_and_nobody_else",
    "a_cancellation_breaks_it": "test_a_cancelled_decision_is_given_up",
    "weights_are_not_applied": "test_new_weights_act_from_their_publication_on",
    "it_names_the_next_version": "test_no_chunk_mixes_versions_while_weights_change_under_traffic",
}


class ActionEngines(ActionEngineContract):
    fault = ""
    deadline_s = 5.0

    def make_policy(self) -> Any:
        return token_policy()

    def make_observation(self, number: int) -> Any:
        return observe(number)

    def open_engine(self) -> Any:
        return opened(TorchActionEngine, self.make_policy(), self.fault)

    async def publish(self, engine: Any, policy: Any, version: int) -> None:
        await engine.lane.run(engine.apply_weights, policy.network, version)


CHAT_FAULTS = {
    "it_names_the_next_version": "test_a_reply_is_a_message_with_its_tokens_log_probs_and_versions",
    "temperature_is_ignored": "test_log_probs_of_a_reply_are_those_of_the_learner_after_temperature",
    "seeds_are_ignored": "test_the_same_seed_gives_the_same_reply",
    "history_is_forgotten": "test_a_conversation_goes_on_from_what_was_said",
    "tools_are_ignored": "test_tools_are_part_of_the_prompt",
    "long_prompts_are_cut": "test_a_prompt_without_room_for_a_reply_is_refused",
    "a_cancellation_breaks_it": "test_a_cancelled_reply_is_given_up",
}


class ChatEngines(ChatEngineContract):
    fault = ""
    deadline_s = 5.0

    def make_policy(self) -> Any:
        return completing_policy()

    def open_engine(self) -> Any:
        return opened(TorchChatEngine, self.make_policy(), self.fault)


class BrokenActor(Actor):
    shared: list[int] = []  # noqa: RUF012

    def __init__(self, fault: str, path: str) -> None:
        self.fault, self.path, self.seen = fault, path, list[int]()

    async def on_stop(self) -> None:
        if self.fault == "it_never_stops":
            await asyncio.Event().wait()

    async def add(self, number: int) -> list[int]:
        if self.fault == "it_writes_a_file":
            with open(self.path, "a") as file:  # noqa: ASYNC230
                file.write("x")
            return [os.path.getsize(self.path)]  # noqa: ASYNC240
        seen = BrokenActor.shared if self.fault == "state_is_the_class_s" else self.seen
        seen.append(number)
        if self.fault == "it_knows_its_process":
            return [*seen, os.getpid()]
        return list(seen)


ACTOR_FAULTS = {
    "it_knows_its_process": "test_it_answers_alike_in_this_loop_and_in_a_process_of_its_own",
    "state_is_the_class_s": "test_two_of_them_share_no_state",
    "it_writes_a_file": "test_a_killed_one_is_replaced_and_answers_as_a_new_one",
    "it_never_stops": "test_it_ends_with_its_runtime_and_leaves_no_process",
}


class Actors(ActorContract):
    fault = ""
    actor = BrokenActor
    stop_grace_s = 1.0

    def __init_subclass__(cls) -> None:
        folder = os.environ.get("BROKEN_CONTRACTS_FOLDER", "/tmp")
        cls.arguments = (cls.fault, os.path.join(folder, cls.__name__))

    async def use(self, actor: Any) -> Any:
        return await actor.add(3)


FAULTS = {
    Envs: ENV_FAULTS,
    Policies: POLICY_FAULTS,
    ActionEngines: ACTION_FAULTS,
    ChatEngines: CHAT_FAULTS,
    Actors: ACTOR_FAULTS,
}

for _contract, _faults in FAULTS.items():
    _rules = [name for name in dir(_contract) if name.startswith("test_")]
    for _fault, _broken in _faults.items():
        # the other rules are left out: a process for each of them would take a minute
        _others: dict[str, Any] = dict.fromkeys(name for name in _rules if name != _broken)
        _name = f"Test{_contract.__name__}_{_fault}"
        globals()[_name] = type(_name, (_contract,), {"fault": _fault, **_others})
