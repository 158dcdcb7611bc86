"""A server that speaks the bytes of OpenEnv 0.10: schemas, sessions, observations, errors.

The schemas were read from the servers of OpenEnv's own examples. `make test-clients` plays OpenEnv itself.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import WSMsgType, web

METADATA = {"title": "Metadata", "type": "object", "additionalProperties": True}
SCHEMAS: dict[str, dict[str, Any]] = {
    "question": {
        "title": "ReasoningGymAction",
        "type": "object",
        "required": ["answer"],
        "properties": {
            "metadata": METADATA,
            "answer": {"title": "Answer", "type": "string"},
        },
    },
    "grid": {
        "title": "GridWorldAction",
        "type": "object",
        "$defs": {
            "MoveAction": {"enum": ["UP", "DOWN"], "title": "MoveAction", "type": "string"},
        },
        "required": ["action"],
        "properties": {
            "metadata": METADATA,
            "action": {"$ref": "#/$defs/MoveAction", "description": "Where to go."},
        },
    },
    "tools": {
        "title": "CallToolAction",
        "type": "object",
        "required": ["tool_name"],
        "properties": {
            "metadata": METADATA,
            "type": {"const": "call_tool", "default": "call_tool", "type": "string"},
            "tool_name": {"title": "Tool Name", "type": "string"},
            "arguments": {"title": "Arguments", "type": "object"},
        },
    },
}
SUBMIT = {
    "name": "submit",
    "description": "Submit the answer.",
    "input_schema": {
        "type": "object",
        "properties": {"answer": {"type": "string"}},
        "required": ["answer"],
    },
}


def observe(observation: dict[str, Any], reward: Any = 0.0, done: bool = False) -> dict[str, Any]:
    return {
        "type": "observation",
        "data": {"observation": observation, "reward": reward, "done": done},
    }


def refuse(code: str, message: str, **details: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code, **details}}


class OpenEnvServer:
    """One kind of environment: `question`, `grid` or `tools`.

    Args:
        kind: which.
        num_sessions: most sessions at a time.
    """

    def __init__(self, kind: str, num_sessions: int = 8) -> None:
        self.kind, self.num_sessions = kind, num_sessions
        self.num_open, self.is_empty = 0, asyncio.Event()
        self.received: list[dict[str, Any]] = []
        self.url = ""

    def answer(self, message: dict[str, Any]) -> Any:
        """Return the answer to one message; None closes the connection, text is sent as it is."""
        data = message["data"]
        if message["type"] == "reset":
            if "refused" in data:
                return refuse("EXECUTION_ERROR", "seed and size must be provided")
            first = {"question": {"question": f"Of seed {data['seed']}: 2 + 2?", "score": None}}
            return observe(first.get(self.kind, {"x": 0, "message": ""}), None)
        if data.get("type") == "list_tools":
            return observe({"tools": [SUBMIT]})
        if "broken" in json.dumps(data):
            return None
        if "garbled" in json.dumps(data):
            return '{"type": "observation", "data": {"reward": "much"}}'
        if self.kind == "question":
            is_right = data["answer"].strip() == "4"
            return observe({"score": float(is_right)}, float(is_right), done=True)
        if self.kind == "grid":
            if data.get("action") not in ("UP", "DOWN"):
                error = {"loc": ["action"], "msg": "Input should be 'UP' or 'DOWN'"}
                return refuse("VALIDATION_ERROR", "Invalid message", errors=[error])
            return observe({"x": 1, "message": "on"}, 1, done=data["action"] == "UP")
        if data["arguments"].get("answer") != "4":
            return observe({"tool_name": "submit", "error": {"message": "wrong"}, "result": None})
        result = {"content": [{"type": "text", "text": "right"}], "data": "right"}
        return observe({"tool_name": "submit", "result": result}, True, done=True)

    async def _describe(self, request: web.Request) -> web.Response:
        if request.path == "/schema":
            return web.json_response({"action": SCHEMAS[self.kind], "observation": {}})
        name = self.kind.title()
        return web.json_response({"name": name, "description": f"{name} environment"})

    async def _serve_session(self, request: web.Request) -> web.WebSocketResponse:
        # as uvicorn does, every 20 s there: it closes connections that answer no ping
        socket = web.WebSocketResponse(heartbeat=0.4)
        await socket.prepare(request)
        if self.num_open >= self.num_sessions:
            full = refuse("CAPACITY_REACHED", "full", max_sessions=self.num_sessions)
            await socket.send_json(full)
            return socket
        self.num_open += 1
        try:
            async for received in socket:
                if received.type != WSMsgType.TEXT:
                    break
                message = json.loads(received.data)
                self.received.append(message)
                answer = self.answer(message)
                if answer is None:
                    break
                await socket.send_str(answer if isinstance(answer, str) else json.dumps(answer))
        finally:
            self.num_open -= 1
            self.is_empty.set()
        return socket


@asynccontextmanager
async def serve(kind: str, num_sessions: int = 8) -> AsyncIterator[OpenEnvServer]:
    """Serve one kind of environment while the context is open."""
    server = OpenEnvServer(kind, num_sessions)
    app = web.Application()
    app.add_routes(
        [
            web.get("/schema", server._describe),
            web.get("/metadata", server._describe),
            web.get("/ws", server._serve_session),
        ]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}"
    try:
        yield server
    finally:
        await runner.cleanup()
