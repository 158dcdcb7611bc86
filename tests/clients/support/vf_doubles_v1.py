"""A v1 environment with a tool server, as users of verifiers 0.3 and later write them: nothing here
knows of vla_rl.
"""

import verifiers.v1 as vf


class Doubling(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    TOOL_PREFIX = "math"

    @vf.tool
    async def double(self, number: int) -> int:
        """Double a number."""
        return 2 * number


class DoubleData(vf.TaskData):
    answer: str


class DoubleTask(vf.Task[DoubleData]):
    @vf.reward(weight=1.0)
    async def is_right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))


class DoubleTaskset(vf.Taskset[DoubleTask, vf.TasksetConfig]):
    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [Doubling(vf.SharedToolsetConfig())]

    def load(self) -> list[DoubleTask]:
        return [
            DoubleTask(
                DoubleData(idx=row, prompt=f"What is twice {row}?", answer=str(2 * row)),
                self.config.task,
            )
            for row in range(20, 23)
        ]


__all__ = ["DoubleTaskset"]

if __name__ == "__main__":
    Doubling.run()
