"""Held-out episodes of an environment that grades itself: every part of its score, by weights.

held_out_scores.jsonl in the run's folder has one line per episode: the weight version, the start,
and all that the environment put into `info["score"]`.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from vla_rl.actors.waits import note_progress
from vla_rl.errors import ConfigError
from vla_rl.evaluation.playing import play_each, within_range
from vla_rl.evaluation.results import whole_lines
from vla_rl.observe import RunDirectory
from vla_rl.observe.undone_lines import set_aside_lines
from vla_rl.rollout import ActionEngine, embodied_agent
from vla_rl.types import EnvPool, EpisodeSpec, Trajectory

SCORES_FILE: Final = "held_out_scores.jsonl"
Line = dict[str, float]


class ScoreJudge:
    """Runs the same episodes at each call, each once per weight version.

    Args:
        episodes: episodes to run, told apart by their `init_state_id`.
    """

    def __init__(self, episodes: Sequence[EpisodeSpec]) -> None:
        self._episodes = tuple(episodes)

    def check(self, run: RunDirectory) -> None:
        """Check that the results in `run` are of these episodes.

        Raises: ConfigError if they are not.
        """
        starts = {episode.options["init_state_id"] for episode in self._episodes}
        strange = {int(line["start"]) for line in read_scores(run.path / SCORES_FILE)} - starts
        if strange:
            raise ConfigError(
                f"{run.path / SCORES_FILE} has results of starts {sorted(strange)[:8]}, which are "
                "not held out in this configuration; resume with the first one's"
            )

    def leave_later(self, run: RunDirectory, version: int) -> None:
        """Set aside the results of weights after `version`, which a resumed run makes again.

        Raises: OSError.
        """
        set_aside_lines(run.path / SCORES_FILE, lambda line: json.loads(line)["weights"] <= version)

    async def __call__(self, run: RunDirectory, pool: EnvPool, engine: ActionEngine) -> None:
        """Run the episodes that this weight version lacks, and print the means of all versions."""
        path, version = run.path / SCORES_FILE, engine.weight_version
        known = await asyncio.to_thread(read_scores, path)
        done = {line["start"] for line in known if line["weights"] == version}
        missing = [each for each in self._episodes if each.options["init_state_id"] not in done]

        async def note(trajectory: Trajectory) -> None:
            line = _line_of(trajectory, version)
            known.append(line)
            await asyncio.to_thread(_append, path, json.dumps(line) + "\n")
            note_progress("held-out episodes")

        await play_each(pool, engine, within_range(embodied_agent), missing, note)
        print(f"held-out scores, mean and 95 % interval:\n{score_table(known)}", flush=True)


def _line_of(trajectory: Trajectory, version: int) -> Line:
    episode, score = trajectory.episode, trajectory.info.get("score")
    if not isinstance(score, dict):
        raise ConfigError(
            f"{episode.env.id} ended an episode without info['score'], expected a number for each "
            "part of its score"
        )
    return {"weights": version, "start": episode.options["init_state_id"], **score}


def _append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def read_scores(path: Path) -> list[Line]:
    """Read all results so far, without a last line that a kill cut off."""
    return [json.loads(line) for line in whole_lines(path).splitlines()]


def score_table(lines: Sequence[Line]) -> str:
    """Return a row for each part of the score: its mean and 95 % interval by weight version."""
    found: dict[str, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        for name in line.keys() - {"weights", "start"}:
            found[name][int(line["weights"])].append(line[name])
    rows = []
    for name in sorted(found, key=lambda name: (name != "total", name)):
        cells = [f"weights {version}: {_mean(found[name][version])}" for version in found[name]]
        rows.append(f"{name:32} {'   '.join(cells)}")
    return "\n".join(rows)


def _mean(values: Sequence[float]) -> str:
    half = 1.96 * float(np.std(values, ddof=1)) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{float(np.mean(values)):.3f} ± {half:.3f} ({len(values)})"
