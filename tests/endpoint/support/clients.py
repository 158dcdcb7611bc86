"""Clients of an endpoint under test."""

from typing import Any

import aiohttp
from openai import AsyncOpenAI

from vla_rl.endpoint import Endpoint, Session

ASK: Any = [{"role": "user", "content": "hello"}]


def client_of(session: Session, **kwargs: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0, **kwargs)


async def request(
    endpoint: Endpoint, method: str, path: str, key: str, body: bytes | None = None
) -> tuple[int, Any]:
    """Status and JSON body."""
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession() as client,
        client.request(
            method, f"{endpoint.base_url}{path}", data=body, headers=headers
        ) as response,
    ):
        return response.status, await response.json()
