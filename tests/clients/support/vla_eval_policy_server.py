"""A predict server of vla-eval; prints its port.

Runs in the server's interpreter: `python vla_eval_policy_server.py CHUNK_SIZE`, 0 for whole chunks.
"""

import sys

import anyio
from shown_actions import show
from vla_eval.model_servers.predict import PredictModelServer
from vla_eval.model_servers.serve import serve_async


class Shown(PredictModelServer):
    def predict(self, obs, ctx):  # type: ignore[no-untyped-def]
        images = obs["images"]
        return {
            "actions": show(images["agentview"], images["wrist"], obs["states"], obs["task_description"])
        }  # fmt: skip


async def main() -> None:
    async with anyio.create_task_group() as tasks:
        server = Shown(chunk_size=int(sys.argv[1]) or None)
        print(await tasks.start(serve_async, server, "127.0.0.1", 0), flush=True)


anyio.run(main)
