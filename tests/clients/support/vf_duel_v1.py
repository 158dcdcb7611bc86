"""A v1 environment in which two agents play against each other, as users of verifiers 0.3 and later
write them.
"""

import verifiers.v1 as vf


class DuelTaskset(vf.Taskset[vf.Task[vf.TaskData], vf.TasksetConfig]):
    def load(self) -> list[vf.Task[vf.TaskData]]:
        return [vf.Task(vf.TaskData(idx=0, prompt="Say a number."), self.config.task)]


class DuelConfig(vf.EnvConfig):
    left: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"}, runtime={"type": "subprocess"})
    right: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"}, runtime={"type": "subprocess"})


class DuelEnv(vf.Env[DuelConfig]):
    """The larger number wins."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        await agents.left.run(task)
        await agents.right.run(task)

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        left, right = episode.traces
        is_won = int(left.last_reply) > int(right.last_reply)
        left.record_reward("won", 1.0 if is_won else -1.0)
        right.record_reward("won", -1.0 if is_won else 1.0)


__all__ = ["DuelEnv", "DuelTaskset"]
