"""A process that serves an endpoint in front of a policy that always gives the same reply. A target
of the campaign.

    python -m benchmarks.faults.endpoint_target

Prints `serving <base url> <key>` and serves until it is killed.
"""

import asyncio
from collections.abc import Sequence

import numpy as np

from vla_rl.endpoint import Endpoint
from vla_rl.types import ANY_REPLY, Completion, Message, Prompt, ReplyOptions, Sampling, ToolSpec


class Parrot:
    """Answers every conversation with the same word. Its tokens are bytes."""

    async def generate(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[ToolSpec] = (),
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        options: ReplyOptions = ANY_REPLY,
    ) -> Completion:
        """Return the word, as a completion of four tokens."""
        tokens = np.frombuffer(b"same", np.uint8).astype(np.int64)
        return Completion(
            message=Message(role="assistant", content="same"),
            prompt_tokens=np.zeros(len(prompt), np.int64),
            tokens=tokens,
            log_probs=np.full(len(tokens), -1.0, np.float32),
            weight_versions=np.zeros(len(tokens), np.int64),
            finish_reason="stop",
        )


async def serve() -> None:
    """Serve until killed."""
    async with Endpoint() as endpoint:
        with endpoint.session(Parrot()) as session:
            print(f"serving {session.base_url} {session.api_key}", flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve())
