"""A v1 environment as users of verifiers write them: nothing here knows of vla_rl."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.stop
    async def single_turn(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward(weight=1.0)
    async def is_right(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == self.data.answer)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class SumConfig(vf.TasksetConfig):
    num_rows: int = 3


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self) -> list[SumTask]:
        return [
            SumTask(
                SumData(
                    idx=row, prompt=f"{row}+{row}=?", system_prompt="Add.", answer=str(2 * row)
                ),
                self.config.task,
            )
            for row in range(1, self.config.num_rows + 1)
        ]


__all__ = ["SumTaskset"]
