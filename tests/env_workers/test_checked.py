"""An environment's faults are named as its own, with its id, what it returned and what was expected.

A chunk is executed row by row, until it is done or the episode ends.
"""

import traceback
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from vla_rl.env_workers.checked_env import CheckedEnv, run_chunk
from vla_rl.errors import EnvError
from vla_rl.types import EnvSpec

STILL = np.zeros(7, np.float32)


def faulty(fault: str, at_step: int = 1) -> CheckedEnv:
    return CheckedEnv(EnvSpec(id="vla_rl/faulty-v0", kwargs={"fault": fault, "at_step": at_step}))


def test_a_sound_environment_is_left_alone() -> None:
    env = CheckedEnv(EnvSpec(id="vla_rl/toy_reach-v0"))
    observation, info = env.reset(seed=3, options=None)
    assert observation["image"].shape == (32, 32, 3)
    assert info == {"is_success": False}
    _, reward, terminated, truncated, _ = env.step(STILL)
    assert (reward, terminated, truncated) == (0.0, False, False)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "wrong_shape",
            r"vla_rl/faulty-v0: {} returned image is uint8 \[28, 32, 3\], expected uint8 \[32, 32, 3\]",
        ),
        (
            "wrong_dtype",
            r"vla_rl/faulty-v0: {} returned state is float64 \[2\], expected float32 \[2\]",
        ),
        (
            "missing_key",
            r"vla_rl/faulty-v0: {} returned observation is a dict with the keys \['image', 'state'\]",
        ),
        (
            "raise",
            r"vla_rl/faulty-v0 with .* {} raised: RuntimeError\('the simulator lost its mind",
        ),
    ],
)
@pytest.mark.parametrize("at_step", [0, 1])
def test_a_broken_contract_names_the_environment_and_what_was_expected(
    fault: str, message: str, at_step: int
) -> None:
    env = faulty(fault, at_step)
    if at_step == 0:
        with pytest.raises(EnvError, match=message.format("reset")):
            env.reset(seed=0, options=None)
    else:
        env.reset(seed=0, options=None)
        with pytest.raises(EnvError, match=message.format("step")):
            env.step(STILL)


def test_an_exception_of_the_environment_carries_its_traceback() -> None:
    env = faulty("raise")
    env.reset(seed=0, options=None)
    with pytest.raises(EnvError) as caught:
        env.step(STILL)
    cause = caught.value.__cause__
    assert isinstance(cause, RuntimeError)
    assert "in _misbehave" in "".join(traceback.format_exception(cause))


def test_a_reward_that_is_no_number_is_refused_alone_and_in_a_chunk() -> None:
    env = faulty("not_finite_reward")
    env.reset(seed=0, options=None)
    with pytest.raises(EnvError, match="reward float nan, expected a finite number"):
        env.step(STILL)
    env = faulty("not_finite_reward")
    env.reset(seed=0, options=None)
    with pytest.raises(EnvError, match="expected finite numbers"):
        env.step_chunk(np.zeros((2, 7), np.float32))


def odd(answer: str) -> CheckedEnv:
    env = CheckedEnv(EnvSpec(id="sample_envs:test/Odd-v0", kwargs={"answer": answer}))
    env.reset(seed=0, options=None)
    return env


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (
            "old_api",
            r"a tuple of 4, expected a tuple \(observation, reward, terminated, truncated, info\)",
        ),
        (
            "nothing",
            r"NoneType None, expected a tuple \(observation, reward, terminated, truncated, info\)",
        ),
        ("no_reward", "the reward NoneType None, expected a number"),
        ("list", r"terminated list \[False\], expected a bool"),
    ],
)
def test_what_a_step_lacks_is_reported_for_a_chunk_too(answer: str, problem: str) -> None:
    with pytest.raises(EnvError, match=f"test/Odd-v0: step returned {problem}$"):
        odd(answer).step_chunk(np.zeros((2, 1), np.float32))


def test_an_end_of_an_array_of_one_is_taken_in_a_chunk() -> None:
    outcome = odd("array").step_chunk(np.zeros((2, 1), np.float32))
    assert (outcome.terminated, outcome.truncated, outcome.info["num_executed"]) == (True, False, 1)


def test_an_environment_that_exits_is_an_error_with_its_frames() -> None:
    with pytest.raises(EnvError, match=r"step raised: SystemExit\(3\)") as alone:
        odd("exits").step(np.zeros(1, np.float32))
    assert "sys.exit(3)" in "".join(traceback.format_exception(alone.value.__cause__))
    with pytest.raises(EnvError, match=r"step raised: SystemExit\(3\)"):
        odd("exits").step_chunk(np.zeros((2, 1), np.float32))


@pytest.mark.parametrize(
    ("env_id", "problem"),
    [
        ("vla_rl/toy_raech-v0", "nothing registers 'vla_rl/toy_raech-v0'.*toy_reach"),
        ("nowhere/x-v0", "nothing registers 'nowhere/x-v0'; write 'module:nowhere/x-v0'"),
        ("sample_envs:test/Old-v0", "the module 'sample_envs' registers no 'test/Old-v0'.*Odd"),
        ("no.such.module:x-v0", "there is no module 'no', expected the one that registers 'x-v0'"),
        ("odd_env:test/Odd-v0", "there is no module 'odd_env', .*on PYTHONPATH"),
    ],
)
def test_an_unknown_id_is_reported_with_its_remedy(env_id: str, problem: str) -> None:
    with pytest.raises(EnvError, match=f"^{env_id} could not be made: {problem}") as caught:
        CheckedEnv(EnvSpec(id=env_id))
    assert caught.value.__cause__ is None  # its message says all


def test_a_module_that_cannot_be_imported_for_another_reason_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_envs.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        EnvError, match=r"could not be made: ModuleNotFoundError.*no_such_package"
    ) as caught:
        CheckedEnv(EnvSpec(id="broken_envs:test/Odd-v0"))
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_an_unknown_argument_is_reported_with_the_nearest() -> None:
    with pytest.raises(EnvError, match="it has no argument 'step_limt'; did you mean 'step_limit'"):
        CheckedEnv(EnvSpec(id="vla_rl/toy_reach-v0", kwargs={"step_limt": 3}))
    with pytest.raises(EnvError, match=r"it has no argument 'colour'; known: 'answer'$"):
        CheckedEnv(EnvSpec(id="sample_envs:test/Odd-v0", kwargs={"colour": "red"}))


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("says_no", "is_success='no', expected True or False"),
        ("share", "is_success=0.3, expected True or False"),
        ("tasks", "is_success={'task': False}, expected True or False"),
        ("numbered", r"the names \[5.*\], expected texts"),
    ],
)
def test_an_info_that_would_be_misread_is_refused_in_steps_and_chunks(
    answer: str, problem: str
) -> None:
    env = CheckedEnv(EnvSpec(id="sample_envs:test/Odd-v0", kwargs={"answer": answer}))
    env.reset(seed=0, options=None)
    for run in (lambda: env.step(np.zeros(1)), lambda: env.step_chunk(np.zeros((1, 1)))):
        with pytest.raises(EnvError, match=f"step returned an info with {problem}"):
            run()


def test_a_success_may_be_a_number_or_an_array_of_one() -> None:
    env = CheckedEnv(EnvSpec(id="sample_envs:test/Odd-v0", kwargs={"answer": "whole"}))
    env.reset(seed=0, options=None)
    assert env.step(np.zeros(1))[4]["is_success"] == 1.0


def test_an_argument_that_is_missing_is_named_before_anything_is_made() -> None:
    named = r"could not be made: it needs the argument 'size'; give it in kwargs=\{'size': ...\}$"
    with pytest.raises(EnvError, match=named):
        CheckedEnv(EnvSpec(id="sample_envs:test/Needy-v0", kwargs={"colour": "red"}))


def test_a_module_in_the_id_is_imported_first() -> None:
    env = CheckedEnv(EnvSpec(id="vla_rl.envs:vla_rl/toy_reach-v0"))
    assert env.reset(seed=0, options=None)[0]["instruction"].startswith("reach the")


def test_a_state_is_refused_by_an_environment_that_has_none() -> None:
    env = CheckedEnv(EnvSpec(id="CartPole-v1"))
    env.reset(seed=0, options=None)
    assert not env.description.has_state
    with pytest.raises(TypeError, match="CartPole-v1 has no get_state"):
        env.get_state()


def test_the_ledger_counts_faults_across_instances(tmp_path: Path) -> None:
    spec = EnvSpec(
        id="vla_rl/faulty-v0",
        kwargs={"fault": "raise", "at_step": 0, "times": 2, "ledger": str(tmp_path)},
    )
    for _ in range(2):
        with pytest.raises(EnvError, match="lost its mind"):
            CheckedEnv(spec).reset(seed=0, options=None)
    CheckedEnv(spec).reset(seed=0, options=None)


class Counter(gymnasium.Env[int, np.ndarray]):
    """Counts its steps, notes which of them it rendered, and ends after `length` steps."""

    observation_space = spaces.Discrete(100)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, length: int = 100, answer: Any = None) -> None:
        self.num_steps, self._length, self._answer = 0, length, answer
        self.render_every_step = True
        self.rendered: list[int] = []

    def step(self, action: np.ndarray) -> Any:
        self.num_steps += 1
        if self.render_every_step:
            self.rendered.append(self.num_steps)
        if self._answer is not None:
            return self._answer
        is_over = self.num_steps >= self._length
        return self.num_steps, float(action[0]), is_over, False, {"at": self.num_steps}

    def render(self) -> Any:
        return np.full((2, 2, 3), self.num_steps, np.uint8)


CHUNK = np.array([[0.5], [-0.5], [1.0]], np.float32)


def test_every_row_is_executed_and_its_reward_kept() -> None:
    observation, rewards, terminated, truncated, info = run_chunk(Counter(), CHUNK)
    assert (observation, terminated, truncated) == (3, False, False)
    assert rewards.dtype == np.float32
    assert rewards.tolist() == [0.5, -0.5, 1.0]
    assert info == {"at": 3, "num_executed": 3}


def test_no_row_is_executed_after_the_end_of_the_episode() -> None:
    env = Counter(length=2)
    _, rewards, terminated, _, info = run_chunk(env, CHUNK)
    assert (env.num_steps, terminated, info["num_executed"]) == (2, True, 2)
    assert rewards.tolist() == [0.5, -0.5]


def test_only_the_last_row_is_rendered_and_the_environment_is_left_as_it_was() -> None:
    env = Counter()
    run_chunk(env, CHUNK)
    assert env.rendered == [3]
    assert env.render_every_step


def test_frames_are_kept_from_each_kth_step_of_the_episode() -> None:
    env = Counter()
    env.num_steps = 3
    *_, info = run_chunk(env, CHUNK, frames_every=2, num_steps_before=3)
    assert info["frames"][:, 0, 0, 0].tolist() == [4, 6]


def test_what_no_chunk_can_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"action chunk is \(0, 1\), expected at least one row"):
        run_chunk(Counter(), CHUNK[:0])
    with pytest.raises(ValueError, match="frames_every is 0, expected >= 1"):
        run_chunk(Counter(), CHUNK, frames_every=0)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((1, 0.0, False, False), "Counter: step returned a tuple of 4, expected a tuple"),
        ((1, "much", False, False, {}), "Counter: step returned the reward str 'much', expected a"),
    ],
)
def test_an_answer_that_is_not_gymnasiums_is_named_with_its_environment(
    answer: Any, said: str
) -> None:
    env = Counter(answer=answer)
    with pytest.raises(EnvError, match=said):
        run_chunk(env, CHUNK)
    assert env.render_every_step
