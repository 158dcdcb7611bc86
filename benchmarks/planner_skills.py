"""One policy for the ten tasks of libero_goal: each of its skills alone, and after another one has moved the scene.

    python -m benchmarks.planner_skills                    what is missing: demonstrations, training, evaluation
    python -m benchmarks.planner_skills --only libero_goal/7
    python -m benchmarks.planner_skills --policy FOLDER    evaluate another policy, and train none
    python -m benchmarks.planner_skills --table            what was kept

The scripted experts record 20 demonstrations of each task from initial states, and 36 that begin after one of the
others, with the hand home again; `sft_libero` goes on from the shipped policy with all of them. A task is a line of
`--keep`, evaluated by the means of tokens, in fast physics and in the images of the demonstrations: 20 starts alone,
and three after each other task. None of them was recorded. A start that the other task's expert does not reach, that
comes undone on the way home, or with which it has solved this task as well, is left out (a dash). A command that was
stopped goes on where it was.

Keys of the last line: `skills`, how many were evaluated; `skills_above_60` and `skills_above_60_after_another`, how
many of them have at least 60 % of their starts; `alone` and `after_another`, percent by task; `after_one_of_a_request`,
that of the starts after a task that a request may ask for beside it: requests combine no two that move the same thing.
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.counted_cpu import read_counted, run_counted
from benchmarks.interleaved import print_json_line
from benchmarks.kept_runs import keep
from benchmarks.planned_runs import (
    format_rate,
    percent,
    planned_command_line,
    print_rows,
    run_missing,
)
from benchmarks.provenance import machine
from vla_rl.actors import Runtime
from vla_rl.env_workers import SimulatorConfig, SimulatorPool
from vla_rl.envs.libero.requests import SKILLS
from vla_rl.envs.libero.tasks import list_tasks
from vla_rl.errors import StartError
from vla_rl.evaluation.run_episodes import embodied_agent_within_range
from vla_rl.evaluation.scenes import LiberoScene
from vla_rl.evaluation.suites import libero_episode
from vla_rl.rollout import run_episode
from vla_rl.types import EnvSpec, Sampling

SUITE: Final = "libero_goal"
TASKS: Final = range(10)
PLANNED: Final = [f"{SUITE}/{task}" for task in TASKS]
KEPT: Final = Path("docs/results/planner_skills.jsonl")

RECIPES: Final = (sys.executable, "-m")
RECORDED: Final = {
    "plain": ("--num", "20"),
    "after": ("--num", "36", "--after-tasks", *map(str, TASKS)),
}
IMAGES: Final = ("--image-size", "84", "--quality", "fast")
TRAINING: Final = (
    *("--from", "vla_rl/assets/libero_goal_base", "--updates", "10000", "--batch", "8"),
    *("--imitation.optimizer.lr", "1e-3", "--imitation.optimizer.decay-steps", "10000"),
)
LIMIT_S: Final = 14_400.0
"""CPU seconds after which a step of the preparation is stopped."""

ALONE: Final = (*range(40, 50), *range(1000, 1010))
AFTER: Final = (40, 44, 1001)
"""Initial states, recorded in no demonstration."""

NO_START: Final = "-"


def prepare_policy(folder: Path) -> Path:
    """Record what is missing of the demonstrations and train the policy; return its folder.

    Raises: CalledProcessError if a command fails; CpuLimitExceeded.
    """
    policy, demonstrations = folder / "policy", folder / "demonstrations"
    folder.mkdir(parents=True, exist_ok=True)
    for kind, options in RECORDED.items():
        for task in TASKS:
            ended = folder / f"recorded_{kind}_{task}"
            if not ended.exists():
                record = (*RECIPES, "vla_rl.recipes.record_demonstrations", *options, *IMAGES)
                where = ("--out", str(demonstrations / kind), "--suite", SUITE)
                command = (*record, *where, "--task-ids", str(task))
                run_counted(command, folder / "cpu_seconds_recording", LIMIT_S)
                ended.touch()
    if not policy.exists():
        train = (*RECIPES, "vla_rl.recipes.sft_libero", *TRAINING)
        command = (*train, "--demonstrations", str(demonstrations), "--out", str(policy))
        run_counted(command, folder / "cpu_seconds_training", LIMIT_S)
    return policy


async def evaluate_task(policy: Path, task: int) -> dict[str, Any]:
    """Return the outcomes of a task's starts, 1 for a success: alone, and by the task that came before."""
    from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine
    from vla_rl.models.loading import CheckpointFormat, load_policy

    scene = LiberoScene(image_size=84, quality="fast", physics="fast")
    alone = scene.make_env_spec(SUITE, task)
    before = [other for other in TASKS if other != task]
    after = [EnvSpec(id=alone.id, kwargs={**alone.kwargs, "after_task": other}) for other in before]
    async with (
        Runtime("skills") as runtime,
        DeviceLane(1) as lane,
        SimulatorPool(runtime, SimulatorConfig(num_envs=2), specs=[alone]) as pool,
        TorchActionEngine(
            load_policy(str(policy), CheckpointFormat(), "cpu"), lane, EngineConfig()
        ) as engine,
    ):

        async def run_start(env: EnvSpec, start: int) -> str:
            sampling = Sampling(greedy=True, by_mean=True)
            episode = libero_episode(env, 0, f"{SUITE}/{task}", start, sampling=sampling, seed=0)
            try:
                ended = await run_episode(pool, engine, embodied_agent_within_range, episode)
            except StartError as error:
                print(f"{SUITE}/{task} from {start}: {error}", file=sys.stderr)
                return NO_START
            return str(int(ended.is_success))

        async def run_starts(env: EnvSpec, starts: Sequence[int]) -> str:
            return "".join([await run_start(env, start) for start in starts])

        outcomes = await asyncio.gather(
            run_starts(alone, ALONE), *(run_starts(env, AFTER) for env in after)
        )
    return {
        "alone": outcomes[0],
        "after": dict(zip(map(str, before), outcomes[1:], strict=True)),
    }


def keep_task(name: str, policy: Path, root: Path, keep_in: Path, note: str) -> None:
    """Evaluate a task and keep its line. Raises: ValueError; OSError; what the policy's folder raises."""
    line = {
        "run": name,
        **asyncio.run(evaluate_task(policy, PLANNED.index(name))),
        **{
            f"cpu_seconds_{step}": round(read_counted(root / f"cpu_seconds_{step}"))
            for step in ("recording", "training")
        },
        "note": note,
        "machine": machine(),
    }
    keep(keep_in, line, lambda line: str(line["run"]))


def join_after(line: dict[str, Any]) -> str:
    """Return the outcomes after any other task, without those that have no start."""
    by_task: dict[str, str] = line["after"]
    return "".join(by_task.values()).replace(NO_START, "")


def join_of_requests(line: dict[str, Any]) -> str:
    """Return the outcomes after those tasks alone that a request may ask for beside this one."""
    # the first words of a skill are the instruction of its task
    moved = {skill.wordings[0]: {*skill.moves} for skill in SKILLS}
    things = [moved[task.instruction] for task in list_tasks(SUITE)]
    own = things[PLANNED.index(line["run"])]
    after: dict[str, str] = line["after"]
    return "".join(
        outcomes for other, outcomes in after.items() if not own & things[int(other)]
    ).replace(NO_START, "")


def summarise_skills(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the keys of the last line."""
    alone = {line["run"]: percent(line["alone"]) for line in lines}
    after = {line["run"]: percent(join_after(line)) for line in lines}
    asked = {line["run"]: percent(join_of_requests(line)) for line in lines}
    return {
        "skills": len(lines),
        "skills_above_60": sum(rate >= 60 for rate in alone.values()),
        "skills_above_60_after_another": sum(rate >= 60 for rate in after.values()),
        "alone": alone,
        "after_another": after,
        "after_one_of_a_request": asked,
    }


def print_kept(lines: Sequence[dict[str, Any]]) -> None:
    """Print the kept tasks as a table, and their JSON line."""
    lines = sorted(lines, key=lambda line: PLANNED.index(line["run"]))
    rows = [
        [
            line["run"],
            *(
                format_rate(outcomes, 0)
                for outcomes in (line["alone"], join_after(line), join_of_requests(line))
            ),
        ]
        for line in lines
    ]
    titles = ["alone, % (95 %)", "after another, % (95 %)", "after one of a request, % (95 %)"]
    print_rows(["task", *titles], rows)
    print_json_line(summarise_skills(lines))


def main() -> int:
    """Run the command line; return the exit status."""
    parser = planned_command_line("planner_skills", __doc__, PLANNED)
    parser.add_argument(
        "--policy", type=Path, help="folder of a policy to evaluate; default: train one"
    )
    options = parser.parse_args()

    def run(name: str) -> None:
        policy = options.policy or prepare_policy(options.runs)
        keep_task(name, policy, options.runs, options.keep, options.note)

    return run_missing(options, PLANNED, run, print_kept)


if __name__ == "__main__":
    sys.exit(main())
