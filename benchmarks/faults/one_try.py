"""One try of a campaign: its random numbers, its folder, and the guarantees that it found
broken.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path


class Skipped(Exception):
    """This machine does not allow a kind of fault; the message gives the reason."""


@dataclass
class Try:
    """One try. Faults draw from `dice`, write below `folder`, and report here.

    `temporary` is the TMPDIR of every process of the try: files in it at the end were left behind.
    """

    number: int
    kind: str
    dice: random.Random
    folder: Path
    broken: list[str] = field(default_factory=list)
    """Guarantees that did not hold, in words."""
    lost_episodes: int = 0
    lost_metric_lines: int = 0
    left_behind: list[str] = field(default_factory=list)

    @property
    def temporary(self) -> Path:
        """Folder for temporary files."""
        return self.folder / "tmp"

    def expect(self, holds: bool, otherwise: str) -> None:
        """Record a broken guarantee unless it holds."""
        if not holds:
            self.broken.append(otherwise)

    @property
    def has_failed(self) -> bool:
        """Whether any guarantee was broken."""
        return bool(self.broken or self.lost_episodes or self.lost_metric_lines or self.left_behind)

    def words(self) -> str:
        """All findings, one line each."""
        lines = list(self.broken)
        if self.lost_episodes:
            lines.append(f"{self.lost_episodes} episodes are accounted for nowhere")
        if self.lost_metric_lines:
            lines.append(f"{self.lost_metric_lines} updates lack exactly one metrics line")
        lines += [f"left behind: {what}" for what in self.left_behind]
        return "\n".join(f"    {line}" for line in lines)
