"""How long, how much and how often: the limits of one text episode."""

from vla_rl.types import Config


class TextLimits(Config, frozen=True, kw_only=True):
    """Limits of one episode. Whatever passes one of the first three ends the episode as truncated. An answer that is too
    long is cut, and a tool that is too slow stopped. A stage that is too slow counts as frozen: the episode is lost and
    played again, and one that is lost again and again ends the run."""

    max_turns: int = 16
    """Replies, of all agents together."""

    max_tool_calls: int = 64
    """Tool calls, of all agents together."""

    max_characters: int = 400_000
    """Characters of everything that was said, prompts and tools' answers included. (Tokens are counted where they are
    known: by the engine, whose context an episode cannot outgrow.)"""

    max_answer_characters: int = 16_000
    """Characters of one tool's answer; what is longer is cut, and says so."""

    setup_timeout_s: float = 120.0
    """For `TextTask.setup`."""

    reply_timeout_s: float = 120.0
    """For `TextTask.reply`, the scorers that it calls included. Those of `vla_rl.scoring` run for 60 s at most, but
    how long they wait for a place in the sandbox counts here as well."""

    tool_timeout_s: float = 10.0
    """For one tool call; it is stopped, and its answer says so."""

    def __post_init__(self) -> None:
        for field in ("max_turns", "max_characters", "max_answer_characters"):
            self.require(getattr(self, field) >= 1, field, ">= 1")
        self.require(self.max_tool_calls >= 0, "max_tool_calls", ">= 0")
        for field in ("setup_timeout_s", "reply_timeout_s", "tool_timeout_s"):
            self.require(getattr(self, field) > 0, field, "> 0 seconds")
