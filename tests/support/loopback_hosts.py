"""Host servers in this loop, and the list that names them."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from vla_rl.actors import make_keys, read_keys
from vla_rl.actors.host import HostServer


@asynccontextmanager
async def loopback_hosts(folder: Path, number: int = 1) -> AsyncIterator[Path]:
    """Serve `far1`, `far2`, ... at ports of this machine; yield the list of hosts."""
    make_keys(folder / "keys")
    keys, client = (read_keys(folder / f"keys/{name}.key") for name in ("server", "client"))
    lines = ['client_key = "keys/client.key"\n']
    async with AsyncExitStack() as stack:
        for k in range(1, number + 1):
            opened = HostServer("tcp://127.0.0.1:0", keys, [client.public], lost_after_s=20.0)
            server = await stack.enter_async_context(opened)
            # a busy machine may hold up any thread for seconds; a closed connection is seen at once
            lines.append(
                f'[[host]]\nname = "far{k}"\naddress = "{server.address}"\n'
                'public_key = "keys/server.pub"\nlost_after_s = 20.0\n'
            )
        path = folder / "hosts.toml"
        path.write_text("".join(lines))
        yield path
