"""Servers that speak the protocols of vLLM and SGLang, as documented, and compute with a real model.

They sample token by token, so that a request can be interrupted, watched and lost in the middle.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import web

from vla_rl.models.language import CausalLanguageModel


class Server:
    """One server.

    Attributes:
        policy: the model, as last loaded from disk.
        loaded: folders that it loaded, in order.
        is_broken: whether it answers every request with status 500.
        between_tokens: awaited after every token.
        asked: number of requests for replies.
        refuses_weights: whether it takes no weights.
        key: API key that it asks for, if any.
        bodies: requests for replies, as they came.
        reports_at: temperature of the log-probs that it reports; None for that of the request.
    """

    def __init__(self, policy: CausalLanguageModel) -> None:
        self.policy, self.loaded = policy, list[str]()
        self.is_broken, self.asked = False, 0
        self.refuses_weights = False
        self.is_paused = False
        self.reports_at: float | None = None
        self.between_tokens: Callable[[], Any] = lambda: asyncio.sleep(0)
        self.url = ""
        self.key: str | None = None
        self.bodies = list[Any]()

    def load(self, folder: str) -> None:
        self.policy = CausalLanguageModel.load(Path(folder))
        self.loaded.append(folder)

    async def sampled(
        self,
        prompt: Sequence[int],
        temperature: float,
        seed: int,
        limit: int,
        stop_tokens: Sequence[int],
        num_alternatives: int,
    ) -> tuple[list[int], list[float], list[list[tuple[int, float]]], str]:
        """Return tokens, their log-probs, the likeliest tokens at each place, and why it ended."""
        self.asked += 1
        generator = torch.Generator().manual_seed(seed)
        tokens: list[int] = []
        log_probs: list[float] = []
        others: list[list[tuple[int, float]]] = []
        while len(tokens) < limit:
            if self.is_paused:
                return tokens, log_probs, others, "abort"
            with torch.inference_mode():
                rows = torch.tensor([[*prompt, *tokens]])
                logits = self.policy.network(rows).logits[0, -1].double()
            scores = torch.log_softmax(logits / (temperature or 1.0), -1)
            token = (
                int(torch.multinomial(scores.exp(), 1, generator=generator))
                if temperature
                else int(scores.argmax())
            )
            tokens.append(token)
            if self.reports_at is not None:
                scores = torch.log_softmax(logits / self.reports_at, -1)
            log_probs.append(float(scores[token]))
            best = scores.topk(num_alternatives)
            others.append(list(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
            if token in stop_tokens:
                return tokens, log_probs, others, "stop"
            if len(tokens) < limit:
                await self.between_tokens()
        return tokens, log_probs, others, "length"

    @web.middleware
    async def _broken(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.is_broken:
            return web.json_response({"error": "out of memory"}, status=500)
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "no such key"}, status=401)
        answer: web.StreamResponse = await handler(request)
        return answer

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._broken])
        app.router.add_get("/health", _ok)
        self.add_routes(app)
        return app

    def add_routes(self, app: web.Application) -> None:
        raise NotImplementedError


class FakeVllm(Server):
    """`vllm serve` with VLLM_SERVER_DEV_MODE=1."""

    has_dev_routes = True

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        if self.has_dev_routes:
            app.router.add_post("/collective_rpc", self._rpc)
            app.router.add_post("/reset_prefix_cache", _ok)

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "small", "object": "model"}]})

    async def _rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["method"] == "reload_weights"
        if self.refuses_weights:
            return web.json_response({"error": "no such tensor"}, status=400)
        self.load(body["kwargs"]["weights_path"])
        return web.json_response({"results": [None]})

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        if len(body["prompt"]) > 200:
            return web.json_response({"error": {"message": "the prompt is too long"}}, status=400)
        tokens, log_probs, others, why = await self.sampled(
            body["prompt"],
            body["temperature"],
            body["seed"],
            body["max_tokens"],
            body["stop_token_ids"],
            body["logprobs"],
        )
        top = [{f"token_id:{token}": value for token, value in row} for row in others]
        choice = {
            "index": 0,
            "text": "",
            "token_ids": tokens,
            "logprobs": {"token_logprobs": log_probs, "top_logprobs": top, "text_offset": []},
            "finish_reason": why,
            "stop_reason": tokens[-1] if why == "stop" else None,
        }
        return web.json_response({"id": "cmpl-1", "choices": [choice], "usage": {}})


class FakeSglang(Server):
    """SGLang's server, by its documented native interface."""

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/get_model_info", self._info)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/update_weights_from_disk", self._update)
        app.router.add_post("/pause_generation", self._pause)
        app.router.add_post("/continue_generation", self._continue)

    async def _info(self, _request: web.Request) -> web.Response:
        return web.json_response({"model_path": "small", "is_generation": True})

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.refuses_weights:
            return web.json_response({"success": False, "message": "no such tensor"})
        self.load(body["model_path"])
        return web.json_response({"success": True, "message": "Succeeded."})

    async def _pause(self, request: web.Request) -> web.Response:
        assert (await request.json()) == {"mode": "abort"}
        self.is_paused = True
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, _request: web.Request) -> web.Response:
        self.is_paused = False
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        wanted = body["sampling_params"]
        if len(body["input_ids"]) > 200:
            return web.json_response({"error": {"message": "the prompt is too long"}}, status=400)
        tokens, log_probs, others, why = await self.sampled(
            body["input_ids"],
            wanted["temperature"],
            wanted["sampling_seed"],
            wanted["max_new_tokens"],
            wanted["stop_token_ids"],
            body["top_logprobs_num"],
        )
        matched = {"matched": tokens[-1]} if why == "stop" else {}
        meta = {
            "id": "1",
            "finish_reason": {"type": why} | matched,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(tokens),
            "output_token_logprobs": [
                [value, token, None] for value, token in zip(log_probs, tokens, strict=True)
            ],
            "output_top_logprobs": [
                [[value, token, None] for token, value in row] for row in others
            ],
        }
        return web.json_response({"text": "", "output_ids": tokens, "meta_info": meta})


async def _ok(_request: web.Request) -> web.Response:
    return web.Response()


@asynccontextmanager
async def serving(server: Server, port: int = 0) -> AsyncIterator[Server]:
    """Let the server answer on this machine, on a free port unless one is given."""
    runner = web.AppRunner(server.app(), shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
        await site.start()
        server.url = "http://{}:{}".format(*runner.addresses[0][:2])
        yield server
    finally:
        await runner.cleanup()


def same_weights(one: CausalLanguageModel, other: CausalLanguageModel) -> bool:
    mine, theirs = one.network.state_dict(), other.network.state_dict()
    return all(np.array_equal(mine[name].numpy(), theirs[name].numpy()) for name in mine)
