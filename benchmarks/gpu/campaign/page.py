"""The results of the campaign: `campaign.json`, and `campaign.md` for people."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.gpu.campaign.found import Found
from benchmarks.gpu.campaign.stages import STAGES


@dataclass(frozen=True)
class Goal:
    """A figure that decides about the machine."""

    title: str
    stage: str
    path: tuple[str, ...]
    """Keys of the figure in the stage's figures."""

    least: float | None = None
    most: float | None = None
    or_stage: str | None = None
    """Another stage with the figure, whose larger value counts."""

    def is_met(self, value: float) -> bool:
        """Return whether a value is inside of the goal's limits; NaN is not."""
        above = self.least is None or value >= self.least
        return above and (self.most is None or abs(value) <= self.most)

    @property
    def limit(self) -> str:
        """The limit as text."""
        return f">= {self.least:g}" if self.least is not None else f"<= {self.most:g}"


GOALS: Final = (
    Goal("comparisons with the CPU that fail", "correctness", ("num_wrong",), most=0.0),
    Goal("tests marked `gpu` that fail", "gpu_tests", ("failed",), most=0.0),
    Goal("share of the peak, 64 episodes act", "decisions", ("64", "peak_share"), least=0.55),
    Goal(
        "MFU of an update, adapters, compiled or not",
        "update_kept",
        ("mfu",),
        least=0.45,
        or_stage="update_compiled",
    ),
    Goal("error of the memory estimate, adapters", "update_kept", ("memory_error",), most=0.05),
    Goal("the same, recomputed", "update_recomputed", ("memory_error",), most=0.05),
    Goal("share of the time to publish, a copy", "publication", ("copied_share",), most=0.05),
    Goal("the same, another process", "publication", ("staged_share",), most=0.05),
    Goal("the same, an engine of vLLM", "vllm", ("published_share",), most=0.05),
    Goal("pixels that an EGL device draws unlike the CPU", "rendering", ("most_apart",), most=0.02),
)


def write_page(folder: Path, known: Sequence[Found], *, is_tiny: bool) -> None:
    """Write both files."""
    by_name = {found.stage: found for found in known}
    goals = {goal.title: _value(goal, by_name) for goal in GOALS}
    missing = [stage.name for stage in STAGES if not _is_done(by_name.get(stage.name))]
    summary = {"is_tiny": is_tiny, "goals": goals, "missing": missing, "stages": by_name}
    data = msgspec.json.format(msgspec.json.encode(summary), indent=1)
    (folder / "campaign.json").write_bytes(data)
    lines = list(_lines(by_name, missing, is_tiny=is_tiny))
    (folder / "campaign.md").write_text("\n".join(lines) + "\n")


def _is_done(found: Found | None) -> bool:
    return found is not None and found.is_whole


def _value(goal: Goal, by_name: Mapping[str, Found]) -> float | None:
    stages = [goal.stage] if goal.or_stage is None else [goal.stage, goal.or_stage]
    values = [
        value
        for stage in stages
        if stage in by_name and (value := _at(goal.path, by_name[stage].figures)) is not None
    ]
    return max(values, default=None)


def _at(path: Sequence[str], value: Any) -> float | None:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, int | float) else None


def _lines(by_name: Mapping[str, Found], missing: Sequence[str], *, is_tiny: bool) -> Iterator[str]:
    yield "# vla_rl on this machine"
    if is_tiny:
        yield "\nThe size is tiny, on the CPU: this page shows that the stages run, and no speed."
    if missing:
        yield f"\nNot finished: {', '.join(missing)}. The same command goes on with them."
    yield "\n| figure | found | goal | |\n|---|---|---|---|"
    for goal in GOALS:
        value = _value(goal, by_name)
        # a goal is of a GPU
        verdict = "" if value is None or is_tiny else "met" if goal.is_met(value) else "**missed**"
        yield f"| {goal.title} | {_text(value)} | {goal.limit} | {verdict} |"
    for stage in STAGES:
        if stage.name in by_name:
            yield from _section(stage.title, by_name[stage.name])


def _section(title: str, found: Found) -> Iterator[str]:
    yield f"\n## {title}\n"
    yield f"`{found.stage}`, {found.seconds:.0f} s."
    if found.left_out:
        yield f"\nLeft out: {found.left_out}"
    if not found.is_whole:
        words = found.failure or "It was cut."
        yield f"\nNot finished; its last words:\n\n```\n{words}\n```"
    if found.figures:
        yield "\n| figure | found |\n|---|---|"
        for name, value in _flat("", found.figures):
            yield f"| {name} | {_text(value)} |"


def _flat(prefix: str, figures: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}: ", value)
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for row in value:
                first, *others = row.values()
                yield f"{prefix}{name}: {first}", ", ".join(_text(each) for each in others)
        else:
            yield f"{prefix}{name}", value


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(str(each) for each in value) or "none"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", "<br>")
