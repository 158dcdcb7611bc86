"""An environment of OpenEnv whose actions are calls of tools (MCP)."""

from typing import Any

from fastmcp import FastMCP
from openenv.core.env_server import Action, Observation, State, create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class AddEnvironment(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("add")

        @server.tool
        def add(left: int, right: int) -> int:
            """Add two numbers."""
            return left + right

        super().__init__(server)

    def reset(self, seed: int | None = None, **options: Any) -> Observation:
        return Observation()

    def _step_impl(self, action: Action, timeout_s: float | None = None, **options: Any) -> Any:
        return Observation()

    @property
    def state(self) -> State:
        return State()


app = create_app(
    AddEnvironment, CallToolAction, CallToolObservation, env_name="add", max_concurrent_envs=4
)
