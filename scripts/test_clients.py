"""Run real clients, each at its newest version in an environment of its own, against a live
endpoint: `make test-clients`.

    this interpreter ─► live endpoint (a process of its own) ◄── HTTP ── pytest in the client's environment

Each client has its own environment because some exclude each other: verifiers 0.4 needs openai < 3,
and this project's own tests need a newer one. The environments are kept in --folder; --upgrade
looks for newer versions.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests" / "clients"
ACTOR = ("msgspec", "numpy>=2.0,<2.4", "pyzmq>=27,<28", "uvloop", "aiohttp", "uv")
"""Packages that an actor of this project needs in another interpreter; uv installs the harnesses of
verifiers."""


@dataclass(frozen=True)
class Client:
    """A client, the packages of its environment, and the file of its tests."""

    packages: tuple[str, ...]
    tests: str
    without_requirements: tuple[str, ...] = ()
    """Packages of which a part is used that needs none of their requirements."""

    runs_episode: bool = False
    """Whether this interpreter runs the tests, with environments or programs in the client's."""


CLIENTS = {
    "openai": Client(("openai", "pytest"), "test_openai_client.py"),
    "openai-agents": Client(("openai-agents", "pytest"), "test_openai_agents.py"),
    "langchain": Client(
        ("langchain", "langchain-openai", "langgraph", "pytest"), "test_langchain.py"
    ),
    "langchain-classic": Client(
        ("langchain-classic", "langchain-openai", "pytest"), "test_langchain_classic.py"
    ),
    "anthropic": Client(("anthropic", "pytest"), "test_anthropic.py"),
    "verifiers-0.2": Client(
        ("verifiers>=0.2,<0.3", *ACTOR), "test_verifiers_environments.py", runs_episode=True
    ),
    "verifiers-0.3": Client(
        ("verifiers>=0.3,<0.4", *ACTOR), "test_verifiers_environments.py", runs_episode=True
    ),
    "verifiers-0.4": Client(
        ("verifiers>=0.4,<0.5", *ACTOR), "test_verifiers_environments.py", runs_episode=True
    ),
    # it needs numpy < 2, and forgets to ask for typing_extensions
    "openpi": Client(
        ("openpi-client", "typing_extensions"), "test_policy_servers.py", runs_episode=True
    ),
    # openpi's server alone, without the JAX of its policies
    "openpi-server": Client(
        ("openpi-client", "typing_extensions"),
        "test_policy_servers.py",
        without_requirements=("rlinf-openpi==0.1.1",),
        runs_episode=True,
    ),
    "vla-eval": Client(("vla-eval",), "test_policy_servers.py", runs_episode=True),
    "openenv": Client(("openenv", "uvicorn"), "test_openenv_environments.py", runs_episode=True),
}


def main() -> int:
    """Test the named clients, or all. Returns: 0 if all passed."""
    parser = argparse.ArgumentParser(description="Test real clients against a live endpoint.")
    parser.add_argument("clients", nargs="*", help=f"of {', '.join(CLIENTS)}; all by default")
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / ".venv" / "clients",
        help="folder of their environments",
    )
    parser.add_argument(
        "--upgrade", action="store_true", help="look for newer versions of installed packages"
    )
    options = parser.parse_args()
    if unknown := sorted(set(options.clients) - set(CLIENTS)):
        parser.error(
            f"there is no client {', '.join(unknown)}; expected some of {', '.join(CLIENTS)}"
        )
    outcomes = {}
    for name in options.clients or CLIENTS:
        client = CLIENTS[name]
        python = environment(options.folder / name, client, upgrade=options.upgrade)
        print(f"\n== {name}: {versions(python, client.packages)}", flush=True)
        outcomes[name] = (
            run_client(name, python, client) if client.runs_episode else ask(python, client)
        )
    print()
    for name, is_passed in outcomes.items():
        python = options.folder / name / "bin" / "python"
        print(f"{'passed' if is_passed else 'FAILED'}  {versions(python, CLIENTS[name].packages)}")
    return 0 if all(outcomes.values()) else 1


def environment(folder: Path, client: Client, *, upgrade: bool) -> Path:
    """Return the interpreter of an environment that has the client's packages."""
    python = folder.absolute() / "bin" / "python"
    is_new = not (folder / ".installed").exists()
    if is_new:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    if is_new or upgrade:
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [str(python), "-m", "pip", "install", "--quiet", "--upgrade"]
        subprocess.run([*command, *client.packages], check=True, env=clean)
        if client.without_requirements:
            subprocess.run(
                [*command, "--no-deps", *client.without_requirements], check=True, env=clean
            )
        (folder / ".installed").touch()
    return python


def versions(python: Path, packages: tuple[str, ...]) -> str:
    """Return the client's packages with their versions."""
    names = [package.partition(">")[0] for package in packages if package not in (*ACTOR, "pytest")]
    program = (
        "from importlib.metadata import version; print(*(n + ' ' + version(n) for n in "
        f"{names!r}), sep=', ')"
    )
    return subprocess.check_output([str(python), "-c", program], text=True).strip()


def ask(python: Path, client: Client) -> bool:
    """Run a client's tests in its environment against a live endpoint.

    Then check the endpoint's record.
    """
    paths = os.pathsep.join([str(ROOT), str(TESTS / "support"), os.environ.get("PYTHONPATH", "")])
    live = subprocess.Popen(
        [sys.executable, str(TESTS / "support" / "live_endpoint.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert live.stdout is not None
    try:
        address = json.loads(live.stdout.readline())
        variables = {
            "VLA_RL_CLIENT": "1",
            "VLA_RL_BASE_URL": address["base_url"],
            "VLA_RL_CALCULATOR": address["calculator"],
            "VLA_RL_REAL": address["real"],
        }
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [
            str(python),
            "-m",
            "pytest",
            "-q",
            "-c",
            os.devnull,
            "--rootdir",
            str(TESTS),
            "--confcutdir",
            str(TESTS),
        ]
        tests = subprocess.run(
            [*command, "-p", "no:cacheprovider", str(TESTS / client.tests)],
            env={**clean, **variables},
            check=False,
        )
        record, _ = live.communicate(timeout=300)
    finally:
        live.kill()
        live.wait()
    print(f"recorded: {record.strip()}", flush=True)
    return tests.returncode == 0 and live.returncode == 0


def run_client(name: str, python: Path, client: Client) -> bool:
    """Run tests here that use programs in the client's interpreter."""
    variables = {
        "VLA_RL_CLIENT": "1",
        "VLA_RL_CLIENT_NAME": name,
        "VLA_RL_CLIENT_PYTHON": str(python),
        # of the user, whose models the changed HOME would hide
        "VLA_RL_USER_CACHE": os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"),
        # verifiers and uv keep their caches and programs there
        "HOME": str(python.parents[1] / "home"),
    }
    Path(variables["HOME"]).mkdir(exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(TESTS / client.tests),
    ]
    return (
        subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, check=False).returncode
        == 0
    )


if __name__ == "__main__":
    sys.exit(main())
