"""Held-out evaluations beside training: whether a run has them, with what, and their summary."""

import msgspec

from vla_rl.evaluation.evaluator import EvaluatorSettings, settings_for
from vla_rl.evaluation.held_out import HeldOutJudge, Judge
from vla_rl.evaluation.held_out_curve import Curve, curve_tables
from vla_rl.learner.checkpoint_folders import BEST
from vla_rl.pipelines.config import LearningConfig, TrainingConfig
from vla_rl.reporting import RunDirectory
from vla_rl.run.judging import JudgingBeside
from vla_rl.run.parts import TrainingParts
from vla_rl.run.run_record import RunRecord
from vla_rl.team.members import Team
from vla_rl.util.plain_console import plain_console


def settings_beside(
    judge: Judge | None, config: LearningConfig, team: Team
) -> EvaluatorSettings | None:
    """Return the settings of evaluations beside training; None if the judge has no such schedule.

    Raises: ConfigError if this run cannot have them.
    """
    if not isinstance(judge, HeldOutJudge) or judge.schedule.every is None:
        return None
    schedule = judge.schedule
    schedule.require(
        len(judge.episodes) > 0 and len(judge.choose) > 0,
        "every",
        f"none, because there are {len(judge.episodes)} held-out starts to report and "
        f"{len(judge.choose)} others to choose the best checkpoint by; at least one of each is needed",
    )
    schedule.require(
        isinstance(config, TrainingConfig) and len(team.members) == 1,
        "every",
        "none but in a run of one policy in simulators",
    )
    assert isinstance(config, TrainingConfig)
    (member,) = team.members.values()
    simulators = msgspec.structs.replace(config.simulators, num_envs=schedule.simulators)
    return settings_for(
        member.model,
        judge.format.line_of,
        judge.film,
        simulators,
        torch_threads=config.run.torch_threads,
        niceness=schedule.niceness,
    )


def judging_beside(
    judge: Judge | None,
    settings: EvaluatorSettings | None,
    parts: TrainingParts,
    run: RunDirectory,
    record: RunRecord,
) -> JudgingBeside | None:
    """Return the evaluations beside training, not started, for which the run saves checkpoints.

    None if `settings` are None.
    """
    if settings is None:
        return None
    assert isinstance(judge, HeldOutJudge)
    first, note = parts.scheduler.version, record.note_late
    beside = JudgingBeside(judge, settings, run, parts.runtime, first=first, note=note)
    parts.saver.also_save(beside.is_due, beside.kept)
    return beside


def print_curve(curve: Curve, run: RunDirectory, version: int) -> None:
    """Print all points, and in one line the results of the final weights, the best and the first."""
    for table in curve_tables(curve):
        plain_console().print(table)
    link = run.checkpoints / BEST
    where = f", {link}" if link.is_symlink() else ""
    print(f"{curve.final_line(version)}{where}", flush=True)
