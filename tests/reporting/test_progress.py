"""Counters and rates of a run, with a clock that only the test moves."""

import threading

import pytest

from vla_rl.reporting import RunProgress


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_success_rate_looks_back_over_the_recent_episodes(make_trajectory) -> None:
    progress = RunProgress(10, recent_episodes=4)
    assert progress.snapshot().success_rate is None
    for outcome in (True, True, True, False, False, True):
        progress.episode_done(make_trajectory(is_success=outcome))
    assert progress.snapshot().success_rate == 0.5  # True, False, False, True
    assert progress.snapshot().num_episodes == 6


def test_success_is_unknown_of_a_task_whose_infos_never_have_the_key(make_trajectory) -> None:
    progress = RunProgress(10)
    for reward in (0.25, 0.75):
        progress.episode_done(
            make_trajectory(task="cartpole", is_success=False, is_judged=False, reward=reward)
        )
    snapshot = progress.snapshot()
    assert snapshot.success_rate is None
    assert snapshot.mean_return == 2.0  # of 4 steps at 0.25, and of 4 at 0.75
    assert (snapshot.tasks["cartpole"].success_rate, snapshot.tasks["cartpole"].mean_return) == (
        None,
        2.0,
    )


def test_the_success_rate_counts_only_tasks_whose_success_is_known(make_trajectory) -> None:
    progress = RunProgress(10)
    for _ in range(3):
        progress.episode_done(make_trajectory(task="cartpole", is_success=False, is_judged=False))
    # an agent's own limit may leave an episode without the key; its task is known from the others
    for is_success, is_judged in ((True, True), (False, False)):
        progress.episode_done(
            make_trajectory(task="drawer", is_success=is_success, is_judged=is_judged)
        )
    assert progress.snapshot().success_rate == 0.5


def test_env_steps_per_second_looks_back_over_the_window(make_trajectory) -> None:
    clock = Clock()
    progress = RunProgress(10, rate_window_s=30.0, clock=clock)
    clock.now += 10.0
    progress.episode_done(make_trajectory(num_steps=200))
    assert progress.snapshot().env_steps_per_s == 20.0  # 200 in the 10 s there were
    clock.now += 25.0
    progress.episode_done(make_trajectory(num_steps=100))
    assert progress.snapshot().env_steps_per_s == 10.0  # 300 in the last 30 s
    clock.now += 10.0
    # the first episode is 35 s old
    assert progress.snapshot().env_steps_per_s == pytest.approx(100 / 30)
    assert progress.snapshot().env_steps == 300


def test_eta_is_the_pace_of_the_last_updates_and_counts_down() -> None:
    clock = Clock()
    progress = RunProgress(10, first_update=4, clock=clock)
    assert progress.snapshot().eta_s is None
    for _ in range(2):
        clock.now += 6.0
        progress.update_done({"rollout": 5.0, "update": 1.0}, "bounded by rollout")
    snapshot = progress.snapshot()
    assert (snapshot.update, snapshot.eta_s) == (6, 24.0)
    clock.now += 4.0
    assert progress.snapshot().eta_s == 20.0
    clock.now += 100.0
    assert progress.snapshot().eta_s == 0.0
    assert progress.snapshot().total_node_seconds == {"rollout": 10.0, "update": 2.0}


def test_eta_knows_nothing_of_what_was_played_before_the_first_update() -> None:
    clock = Clock()
    progress = RunProgress(3, clock=clock)
    clock.now += 200.0
    progress.updates_begin()
    clock.now += 6.0
    progress.update_done({}, "")
    assert progress.snapshot().eta_s == 12.0
    assert progress.snapshot().elapsed_s == 206.0


def test_tasks_are_counted_apart(make_trajectory) -> None:
    progress = RunProgress(1)
    for task, outcome in (("a", True), ("a", False), ("b", False)):
        progress.episode_done(make_trajectory(task=task, is_success=outcome))
    tasks = progress.snapshot().tasks
    assert {
        task: (t.num_episodes, t.num_successes, t.success_rate) for task, t in tasks.items()
    } == {
        "a": (2, 1, 0.5),
        "b": (1, 0, 0.0),
    }


def test_another_thread_sees_whole_snapshots(make_trajectory) -> None:
    progress, trajectory, torn = RunProgress(10_000), make_trajectory(num_steps=3), []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            snapshot = progress.snapshot()
            if snapshot.env_steps != 3 * snapshot.num_episodes:
                torn.append(snapshot)

    looker = threading.Thread(target=look)
    looker.start()
    for _ in range(2000):
        progress.episode_done(trajectory)
    done.set()
    looker.join(timeout=60)
    assert not torn
    assert progress.snapshot().num_episodes == 2000
