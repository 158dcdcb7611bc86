"""What a person sees of a run: a table in a terminal, a line an update in a log, rates by a clock."""

import io
import threading

import pytest
from rich.console import Console

from vla_rl.actors import Wait
from vla_rl.reporting import LiveView, RunProgress, print_summary, update_line
from vla_rl.reporting.console import live_table
from vla_rl.reporting.progress import Snapshot, TaskTally


def progress_of_four_episodes(make_trajectory, **arguments) -> RunProgress:
    progress = RunProgress(4, clock=iter(range(10_000)).__next__, **arguments)
    for episode_id in range(4):
        progress.episode_done(
            make_trajectory(episode_id, is_success=episode_id == 0, task=f"goal/{episode_id % 2}")
        )
    progress.update_done({"rollout": 12.5, "update": 3.25}, "bounded by rollout, 12.5 of 15.8 s")
    return progress


def render(renderable: object) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_log_gets_one_plain_line_an_update(make_trajectory) -> None:
    file = io.StringIO()
    progress = progress_of_four_episodes(make_trajectory, policy_busy_share=lambda: 0.71)
    with LiveView(progress, Console(file=file)) as view:
        view.after_update()
        view.after_update()
    lines = file.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("update 1/4  episodes 4  success 25%  return 0  env steps/s ")
    assert "policy busy 71%  bounded by rollout, 12.5 of 15.8 s  eta 0:00:" in lines[0]
    assert "\x1b" not in file.getvalue()


def test_the_line_before_the_first_episode_has_dashes() -> None:
    line = update_line(RunProgress(4).snapshot())
    assert line == "update 0/4  episodes 0  success -  return -  env steps/s 0.0  eta -"


def test_a_run_whose_success_is_unknown_shows_its_return_and_says_so_once(make_trajectory) -> None:
    file, progress = io.StringIO(), RunProgress(4)
    with LiveView(progress, Console(file=file, width=100)) as view:
        for number in range(5):
            progress.episode_done(
                make_trajectory(
                    number,
                    task=f"mine/{number}",
                    is_success=False,
                    is_evaluated=False,
                    reward=0.4975,
                )
            )
        view.after_update()
        view.after_update()
    updates = [line for line in file.getvalue().splitlines() if line.startswith("update ")]
    assert all("success -  return 1.99  " in line for line in updates)
    notes = [line for line in file.getvalue().splitlines() if "is_success" in line]
    assert len(notes) == 1
    assert (
        "no episode of mine/0, mine/1, mine/2 and "
        "2 more has had 'is_success' in its info" in notes[0]
    )
    assert "success -" in render(live_table(progress.snapshot(), [], now_s=0.0))
    assert "1.99" in render(live_table(progress.snapshot(), [], now_s=0.0))


def test_a_run_whose_success_is_known_gets_no_note(make_trajectory) -> None:
    file = io.StringIO()
    with LiveView(
        progress_of_four_episodes(make_trajectory), Console(file=file, width=100)
    ) as view:
        view.after_update()
    assert "is_success" not in file.getvalue()


def test_the_table_shows_nodes_and_the_longest_waits(make_trajectory) -> None:
    waits = [
        Wait(f"episode {number}", f"env-{number}", since=100.0 + number) for number in range(7)
    ]
    text = render(
        live_table(progress_of_four_episodes(make_trajectory).snapshot(), waits, now_s=110.0)
    )
    assert "1/4" in text
    assert "success 25%" in text
    assert "bounded by rollout, 12.5 of 15.8 s" in text
    assert "12.50 s" in text
    assert "3.25 s" in text
    assert "episode 0 waits for env-0 since 10.0 s" in text
    assert "episode 5" not in text
    assert "and 2 more waits" in text


def test_in_a_terminal_a_thread_renders_while_the_loop_is_busy_elsewhere(make_trajectory) -> None:
    rendered, threads = threading.Event(), set[threading.Thread]()

    def waits() -> list[Wait]:
        threads.add(threading.current_thread())
        if threading.current_thread() is not threading.main_thread():
            rendered.set()
        return [Wait("update 2", "episodes", 0.0)]

    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100)
    with LiveView(
        progress_of_four_episodes(make_trajectory), console, refresh_hz=50.0, waits=waits
    ) as view:
        assert rendered.wait(timeout=60)
        view.after_update()
    assert "update 2 waits for episodes" in file.getvalue()
    for thread in threads - {threading.main_thread()}:
        thread.join(timeout=60)
        assert not thread.is_alive()


def test_the_summary_has_success_by_task_drops_by_cause_and_time_by_node(make_trajectory) -> None:
    console = Console(file=io.StringIO(), width=100)
    print_summary(
        progress_of_four_episodes(make_trajectory).snapshot(),
        num_filtered=8,
        dropped={"stale": 2},
        console=console,
    )
    rows = [
        " ".join(line.replace("│", " ").split()) for line in console.file.getvalue().splitlines()
    ]  # type: ignore[attr-defined]
    assert "updates 1/4" in rows
    assert "filtered 8" in rows
    assert "dropped (stale) 2" in rows
    assert "goal/0 2 1 50.0% 0" in rows
    assert "goal/1 2 0 0.0% 0" in rows
    assert "all 4 1 25.0% 0" in rows
    assert any(row.startswith("rollout 12.50") for row in rows)


def test_the_summary_has_dashes_for_tasks_whose_success_is_unknown(make_trajectory) -> None:
    progress = RunProgress(4)
    progress.episode_done(make_trajectory(task="drawer", is_success=True, reward=0.25))
    progress.episode_done(
        make_trajectory(task="cartpole", is_success=False, is_evaluated=False, reward=0.5)
    )
    console = Console(file=io.StringIO(), width=100)
    print_summary(progress.snapshot(), num_filtered=0, dropped={}, console=console)
    rows = [
        " ".join(line.replace("│", " ").split()) for line in console.file.getvalue().splitlines()
    ]  # type: ignore[attr-defined]
    assert "drawer 1 1 100.0% 1" in rows
    assert "cartpole 1 - - 2" in rows
    assert "all 2 1 100.0% 1.5" in rows  # the rate is of the tasks whose success is known


def test_the_summary_of_a_run_without_an_episode_is_printed_too() -> None:
    console = Console(file=io.StringIO(), width=100)
    print_summary(RunProgress(4).snapshot(), num_filtered=0, dropped={}, console=console)
    assert "0/4" in console.file.getvalue()  # type: ignore[attr-defined]


def words(snapshot: Snapshot, num_filtered: int = 0, dropped: dict[str, int] | None = None) -> str:
    """Return the summary with single spaces and without lines of boxes."""
    console = Console(file=io.StringIO(), width=120)
    print_summary(snapshot, num_filtered, dropped or {}, console)
    text = console.file.getvalue()
    rows = (
        "".join(" " if ord(each) > 0x2000 else each for each in row) for row in text.split("\n")
    )
    return "\n".join(" ".join(row.split()) for row in rows)


def snapshot(elapsed_s: float = 10.0, **others) -> Snapshot:
    fields = {
        "num_updates": 5,
        "update": 4,
        "elapsed_s": elapsed_s,
        "eta_s": None,
        "num_episodes": 1200,
        "success_rate": None,
        "mean_return": None,
        "env_steps": 5000,
        "env_steps_per_s": 0.0,
        "policy_busy_share": None,
        "critical_path": "",
    } | others
    return Snapshot(**fields)


def test_a_run_is_counted_by_outcome() -> None:
    found = words(snapshot(), num_filtered=3, dropped={"stale": 2, "died": 1})
    assert "updates 4/5" in found
    assert "episodes 1,200" in found
    assert found.index("filtered 3") < found.index("dropped (died) 1") < found.index("(stale) 2")
    assert "env steps/s 500.0" in found


def test_tasks_have_their_rates_and_one_line_together() -> None:
    tasks = {"b": TaskTally(4, 1, 2.0, True), "a": TaskTally(4, 3, 6.0, True)}
    found = words(snapshot(tasks=tasks))
    assert found.index("a 4 3 75.0%") < found.index("b 4 1 25.0%") < found.index("all 8 4 50.0%")


def test_a_task_of_unknown_success_does_not_count_in_the_rate_of_all() -> None:
    tasks = {"a": TaskTally(4, 3, 6.0, True), "silent": TaskTally(4, 0, 2.0, False)}
    found = words(snapshot(tasks=tasks))
    assert "silent 4 - -" in found
    assert "all 8 3 75.0%" in found


def test_nodes_stand_by_their_time() -> None:
    found = words(snapshot(total_node_seconds={"update": 2.5, "rollout": 9.0}))
    assert found.index("rollout 9.00 90%") < found.index("update 2.50 25%")


def test_a_run_that_ended_at_once_divides_by_nothing() -> None:
    found = words(snapshot(elapsed_s=0.0, total_node_seconds={"update": 0.0}))
    assert "env steps/s 0.0" in found
    assert "update 0.00 0%" in found


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
            make_trajectory(task="cartpole", is_success=False, is_evaluated=False, reward=reward)
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
        progress.episode_done(
            make_trajectory(task="cartpole", is_success=False, is_evaluated=False)
        )
    # an agent's own limit may leave an episode without the key; its task is known from the others
    for is_success, is_evaluated in ((True, True), (False, False)):
        progress.episode_done(
            make_trajectory(task="drawer", is_success=is_success, is_evaluated=is_evaluated)
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


def test_eta_knows_nothing_of_what_was_run_before_the_first_update() -> None:
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
