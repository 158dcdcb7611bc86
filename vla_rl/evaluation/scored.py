"""Held-out episodes of an environment that grades itself: every part of its score, by weights.

held_out_scores.jsonl in the run's folder has one line per episode: the weight version, the start,
and all that the environment put into `info["score"]`.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from vla_rl.errors import ConfigError
from vla_rl.evaluation.held_out import Film, HeldOutJudge
from vla_rl.evaluation.held_out_book import HeldOutRow, RowFormat
from vla_rl.evaluation.held_out_schedule import HeldOutSchedule
from vla_rl.evaluation.results import Key, whole_lines
from vla_rl.reporting import RunDirectory
from vla_rl.types import EpisodeSpec, Trajectory

Line = dict[str, float]


class ScoreJudge(HeldOutJudge):
    """A `HeldOutJudge` of episodes that are graded, with the mean of `total` as their measure.

    Args:
        episodes: episodes to run, told apart by their `init_state_id`.
        schedule: evaluations during the run.
        film: makes strips.
        policy_digest, choose: as those of `HeldOutJudge`.
    """

    def __init__(
        self,
        episodes: Sequence[EpisodeSpec],
        schedule: HeldOutSchedule | None = None,
        film: Film | None = None,
        policy_digest: str = "",
        choose: Sequence[EpisodeSpec] | None = None,
    ) -> None:
        super().__init__(
            episodes,
            film,
            choose=choose,
            schedule=schedule,
            format=SCORES,
            policy_digest=policy_digest,
        )

    def check(self, run: RunDirectory) -> None:
        """Check that the results in `run` are of these episodes.

        Raises: ConfigError if they are not.
        """
        super().check(run)
        for format, episodes in (
            (self.format, self.one_set),
            (self.choose_format, self.choose),
        ):
            starts, path = {format.key_of(each)[1] for each in episodes}, run.path / format.file
            strange = {int(line["start"]) for line in read_scores(path)} - starts
            # without a schedule, the starts that chose before are left alone
            if strange and episodes:
                raise ConfigError(
                    f"{path} has results of starts {sorted(strange)[:8]}, which are not held out in "
                    "this configuration; resume with the first one's"
                )


def line_of(weight_version: int, trajectory: Trajectory) -> bytes:
    """Return the line of an episode in held_out_scores.jsonl.

    Raises: ConfigError if its environment did not grade it.
    """
    episode, score = trajectory.episode, trajectory.info.get("score")
    if not isinstance(score, dict):
        raise ConfigError(
            f"{episode.env.id} ended an episode without info['score'], expected a number for each "
            "part of its score"
        )
    start = episode.options["init_state_id"]
    return json.dumps({"weights": weight_version, "start": start, **score}).encode()


def _row_in(line: bytes) -> HeldOutRow:
    found = json.loads(line)
    try:
        return HeldOutRow(found["weights"], ("", found["start"], 0), float(found["total"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"expected weights, start and total, got {found!r}") from error


def _key_of(episode: EpisodeSpec) -> Key:
    return "", episode.options["init_state_id"], 0


def read_scores(path: Path) -> list[Line]:
    """Read all results so far, without a last line that a kill cut off."""
    return [json.loads(line) for line in whole_lines(path).splitlines()]


def _table_of(lines: Sequence[bytes]) -> str:
    rows = score_table([json.loads(line) for line in lines])
    return f"held-out scores, mean and 95 % interval:\n{rows}"


def score_table(lines: Sequence[Line]) -> str:
    """Return a row for each part of the score: its mean and 95 % interval by weight version."""
    rows = []
    for name, means in score_means(lines).items():
        cells = [f"weights {version}: {mean}" for version, mean in means.items()]
        rows.append(f"{name:32} {'   '.join(cells)}")
    return "\n".join(rows)


def score_means(lines: Sequence[Line]) -> dict[str, dict[int, str]]:
    """Return the mean and 95 % interval of each part of the score by weight version, total first."""
    found: dict[str, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        for name in line.keys() - {"weights", "start"}:
            found[name][int(line["weights"])].append(line[name])
    return {
        name: {version: _mean(values) for version, values in found[name].items()}
        for name in sorted(found, key=lambda name: (name != "total", name))
    }


def _mean(values: Sequence[float]) -> str:
    half = 1.96 * float(np.std(values, ddof=1)) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{float(np.mean(values)):.3f} ± {half:.3f} ({len(values)})"


SCORES: Final = RowFormat(
    file="held_out_scores.jsonl",
    measure="score",
    line_of=line_of,
    row_in=_row_in,
    key_of=_key_of,
    table_of=_table_of,
)
"""All parts of each episode's score; their `total` counts."""
