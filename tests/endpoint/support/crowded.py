"""A process with few file descriptors that serves an endpoint and then starts an actor.

It prints its port, waits for a line, starts the actor and answers a request; each step is one line
of its output.
"""

import asyncio
import os
import resource
import sys

import aiohttp
import uvloop
from byte_policy import BytePolicy

from vla_rl.actors import Actor, ChildProcess, Runtime
from vla_rl.endpoint import Endpoint

NUM_FREE = 120


class Worker(Actor):
    async def pid(self) -> int:
        return os.getpid()


async def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with Runtime() as runtime:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + NUM_FREE, hard)
        )
        async with Endpoint() as endpoint:
            print(endpoint.base_url.split(":")[2].split("/")[0], flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            print(endpoint.num_connections, flush=True)
            worker = await runtime.spawn(Worker, name="worker", placement=ChildProcess())
            assert await worker.pid() != os.getpid()
            with endpoint.session(BytePolicy("hi")) as session:
                # without the package openai, whose import takes a second
                async with aiohttp.ClientSession(raise_for_status=True) as client:
                    asked = client.post(
                        f"{session.base_url}/chat/completions",
                        headers={"Authorization": f"Bearer {session.api_key}"},
                        json={"model": "m", "messages": [{"role": "user", "content": "hello"}]},
                    )
                    async with asked as response:
                        answer = await response.json()
            print(answer["choices"][0]["message"]["content"], flush=True)


if __name__ == "__main__":
    uvloop.run(main())  # as recipes do
