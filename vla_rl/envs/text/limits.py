"""Limits of one text episode: turns, tool calls, characters and time."""

from vla_rl.types import Config


class TextLimits(Config, frozen=True, kw_only=True):
    """Limits of one episode.

    An episode that exceeds one of the first three ends as truncated. A tool's answer that is too
    long is cut, and a tool that is too slow is stopped. A stage that is too slow counts as frozen:
    the episode is lost and run again, and one that is lost repeatedly ends the run.
    """

    max_turns: int = 16
    """Largest number of replies, of all agents together."""

    max_tool_calls: int = 64
    """Largest number of tool calls, of all agents together."""

    max_characters: int = 400_000
    """Largest number of characters of all messages, including prompts and tools' answers. (Tokens
    are counted by the engine, whose context an episode cannot exceed.)
    """

    max_answer_characters: int = 16_000
    """Largest number of characters of one tool's answer; a longer one is cut, with a note."""

    setup_timeout_s: float = 120.0
    """Time limit of `TextTask.setup`, in seconds."""

    reply_timeout_s: float = 120.0
    """Time limit of `TextTask.reply`, in seconds, including its scorers. Those of `vla_rl.scoring`
    run for 60 s at most, but their wait for a place in the sandbox counts here as well.
    """

    tool_timeout_s: float = 10.0
    """Time limit of one tool call, in seconds; a slower one is stopped, with a note in its
    answer."""

    def __post_init__(self) -> None:
        for field in ("max_turns", "max_characters", "max_answer_characters"):
            self.require(getattr(self, field) >= 1, field, ">= 1")
        self.require(self.max_tool_calls >= 0, "max_tool_calls", ">= 0")
        for field in ("setup_timeout_s", "reply_timeout_s", "tool_timeout_s"):
            self.require(getattr(self, field) > 0, field, "> 0 seconds")
