"""An endpoint for clients in interpreters of their own: a key for a policy that adds, and one for a
model of random weights.

Its first line of output says where it is. It serves until its input ends; then a learner takes an
update from everything that the model said, and the last line tells how far its log-probs were from
the recorded ones.
"""

import asyncio
import json
import sys

import uvloop
from calculator import Calculator

from vla_rl.endpoint import Endpoint, Session
from vla_rl.engines import DeviceLane, EngineConfig, TorchChatEngine
from vla_rl.learner import Learner, LearnerConfig, OptimizerConfig
from vla_rl.models.language import CausalLanguageModel, TinyConfig, tiny
from vla_rl.rollout.policies import EpisodePolicy
from vla_rl.types import EnvSpec, EpisodeSpec, StopReason

SHAPE = TinyConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=64,
    vocab_size=300,
    context_size=4096,
)
EPISODE = EpisodeSpec(
    episode_id=0, group_id=0, member=0, env=EnvSpec(id="x"), task="clients", seed=0, policy_seed=0
)
MAX_GAP = 1e-3


async def learned_gap(model: CausalLanguageModel, lane: DeviceLane, session: Session) -> float:
    """Largest difference between the recorded log-probs and the learner's; 0 if the model was not
    asked.
    """
    if not session.calls:
        return 0.0
    trajectory = session.trajectory(EPISODE, 1.0, StopReason.TERMINATED)
    config = LearnerConfig(
        optimizer=OptimizerConfig(warmup_steps=0), max_mismatch=MAX_GAP, micro_batch=1
    )
    report = await Learner(model, lane, config).update([trajectory], [1.0])
    return report.metrics["update/log_prob_gap_max"]


async def main() -> None:
    model = tiny(SHAPE, ["a"], seed=0)
    config = EngineConfig(max_reply=512)
    async with (
        DeviceLane(num_threads=1) as lane,
        TorchChatEngine(model, lane, config) as engine,
        Endpoint() as endpoint,
    ):
        with (
            endpoint.session(Calculator()) as calculator,
            endpoint.session(EpisodePolicy(engine, EPISODE)) as real,
        ):
            keys = {"calculator": calculator.api_key, "real": real.api_key}
            print(json.dumps({"base_url": endpoint.base_url, **keys}), flush=True)
            await asyncio.to_thread(sys.stdin.read)
            gap = await learned_gap(model, lane, real)
            num_guided = sum(call.completion.grammar is not None for call in real.calls)
            print(
                json.dumps(
                    {
                        "num_calls": len(calculator.calls) + len(real.calls),
                        "num_guided": num_guided,
                        "largest_gap": gap,
                    }
                ),
                flush=True,
            )
    sys.exit(0 if gap < MAX_GAP else 1)


if __name__ == "__main__":
    uvloop.run(main())
