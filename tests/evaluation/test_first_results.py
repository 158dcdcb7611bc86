"""Held-out results of the first weights that another run has already."""

import json
from pathlib import Path

import pytest

from vla_rl.errors import ConfigError
from vla_rl.evaluation.held_out import conditions_path
from vla_rl.evaluation.held_out_schedule import HeldOutSchedule
from vla_rl.evaluation.scored import SCORES, ScoreJudge
from vla_rl.reporting import RunDirectory
from vla_rl.types import Config, EnvSpec, EpisodeSpec, Sampling


def episodes(num: int = 3, version: str = "epdms_v2") -> list[EpisodeSpec]:
    return [
        EpisodeSpec(
            episode_id=number,
            group_id=number,
            member=0,
            env=EnvSpec(id="vla_rl/driving-v0", kwargs={"version": version}),
            task="driving",
            options={"init_state_id": number},
            sampling=Sampling(greedy=True),
            seed=0,
            policy_seed=0,
        )
        for number in range(num)
    ]


def line(weights: int, start: int) -> bytes:
    return json.dumps({"weights": weights, "start": start, "total": start / 10}).encode()


@pytest.fixture
def other(tmp_path: Path) -> RunDirectory:
    """A run of policy p whose weights 0 and 4 have run three starts."""
    run = RunDirectory.create(tmp_path, "other", Config(), {"policy_digest": "p"})
    lines = [line(weights, start) for weights in (0, 4) for start in (2, 0, 1)]
    (run.path / SCORES.file).write_bytes(b"".join(each + b"\n" for each in lines))
    conditions_path(run).write_text(json.dumps(ScoreJudge(episodes()).conditions))
    return run


def judge_of(
    other: RunDirectory, wanted: list[EpisodeSpec] | None = None, policy: str = "p"
) -> ScoreJudge:
    schedule = HeldOutSchedule(first_results_of=str(other.path))
    return ScoreJudge(wanted or episodes(), schedule, policy_digest=policy)


def test_a_run_begins_with_the_first_results_of_another(
    other: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory.create(tmp_path, "new", Config())
    book = judge_of(other).open(run)
    assert not book.missing(0, episodes())
    assert len(book.missing(4, episodes())) == 3
    assert book.lines == [line(0, start) for start in range(3)]
    assert (
        capsys.readouterr().out
        == f"the 3 held-out results of the first weights in {SCORES.file} are those of {other.path}\n"
    )


def test_a_resumed_run_keeps_its_own_results(other: RunDirectory, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "new", Config())
    (run.path / SCORES.file).write_bytes(line(0, 1) + b"\n")
    book = judge_of(other).open(run)
    assert book.lines == [line(0, 1)]


@pytest.mark.parametrize(
    ("policy", "wanted", "words"),
    [
        ("q", episodes(), "started from the policy with the digest p, expected q"),
        ("", episodes(), "this recipe makes its policy anew in each run"),
        ("p", episodes(version="pdms_v1"), "version is 'pdms_v1' now"),
        ("p", episodes(5), "lacks 2 of 5 held-out episodes of the first weights"),
    ],
    ids=["another policy", "a policy made anew", "other conditions", "other starts"],
)
def test_a_run_that_does_not_fit_is_refused_before_anything_starts(
    other: RunDirectory, policy: str, wanted: list[EpisodeSpec], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        judge_of(other, wanted, policy)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected the folder of a run"):
        judge_of(RunDirectory(tmp_path))


def test_results_without_their_conditions_are_refused(other: RunDirectory) -> None:
    conditions_path(other).unlink()
    with pytest.raises(ConfigError, match="expected the conditions of the results beside it"):
        judge_of(other)
