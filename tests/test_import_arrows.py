"""The package's rooms import one way only, and what a simulator process imports stays free of
torch.
"""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "vla_rl"

# fmt: off
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "util": {
        "errors",
    },
    "types": {
        "errors", "util",
    },
    "graph": {
        "util", "errors",
    },
    "actors": {
        "errors", "util",
    },
    "cluster": {
        "util", "errors", "types", "actors",
    },
    "algorithms": {
        "errors", "util", "types",
    },
    "env_workers": {
        "errors", "util", "types", "actors",
    },
    "sandbox": {
        "util", "types", "actors",
    },
    "scoring": {
        "errors", "util", "sandbox",
    },
    "rollout": {
        "errors", "util", "types", "actors",
    },
    "datasets": {
        "errors", "util", "types",
    },
    "replay": {
        "errors", "util", "types", "datasets",
    },
    "reporting": {
        "errors", "util", "types", "graph", "actors",
    },
    "engines": {
        "errors", "util", "types", "actors", "rollout",
    },
    "learner": {
        "errors", "util", "types", "graph", "actors", "algorithms", "engines", "replay",
    },
    "envs": {
        "errors", "util", "types", "actors", "env_workers", "sandbox", "scoring",
        "datasets",
    },
    "models": {
        "errors", "util", "types", "algorithms", "engines", "learner", "replay",
    },
    "pipelines": {
        "errors", "util", "types", "graph", "actors", "cluster", "algorithms", "env_workers",
        "rollout", "engines", "learner", "envs", "replay",
    },
    "serving": {
        "errors", "util", "types", "rollout", "engines", "learner",
    },
    "evaluation": {
        "errors", "util", "types", "graph", "actors", "algorithms", "env_workers",
        "rollout", "reporting", "engines", "envs", "models", "serving",
    },
    "team": {
        "util", "errors", "types", "actors", "env_workers", "rollout", "engines", "learner", "envs",
        "models", "pipelines",
    },
    "remote_rollout": {
        "errors", "util", "types", "graph", "actors", "cluster", "algorithms", "rollout",
        "reporting", "engines", "learner", "envs", "models", "pipelines", "evaluation",
        "team",
    },
    "run": {
        "errors", "util", "types", "graph", "actors", "cluster", "algorithms",
        "env_workers", "rollout", "datasets", "reporting", "engines", "learner", "envs",
        "models", "replay", "pipelines", "evaluation", "team", "remote_rollout",
    },
    "endpoint": {
        "errors", "util", "types", "actors", "rollout",
    },
    "cli": {
        "errors", "util", "types", "actors", "cluster", "env_workers", "rollout",
        "reporting", "engines", "learner", "envs", "models", "replay", "pipelines", "evaluation",
        "team", "remote_rollout", "run", "serving", "endpoint",
    },
    # endpoint: `grpo_verifiers` opens its pool of verifiers' environments
    "recipes": {
        "errors", "util", "types", "actors", "algorithms", "env_workers", "scoring",
        "rollout", "datasets", "reporting", "engines", "learner", "envs", "models",
        "pipelines", "evaluation", "team", "run", "endpoint", "serving", "cli",
    },
    # a user's test file stands above all rooms, so what it inherits may know any; nothing imports it
    "testing": {
        "errors", "types", "actors", "env_workers", "engines", "envs", "util",
    },
}
# fmt: on
"""The rooms that each may import, from the ground up. A new arrow is a decision."""


BODIES = ("body", "orelse", "finalbody", "handlers", "cases")
"""Where statements stand in others; expressions are most of a tree, and hold none."""

Imports = tuple[ast.Import | ast.ImportFrom, ...]


@functools.cache
def imports_in(path: Path) -> Imports:
    """Return the imports of a file, also those in functions and for type checkers."""
    nodes = statements_in(path.read_text())
    return tuple(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))


def statements_in(text: str) -> Iterator[ast.AST]:
    """Yield each statement of a module, also those in functions, classes and branches."""
    left: list[ast.AST] = [ast.parse(text)]
    while left:
        node = left.pop()
        yield node
        for name in BODIES:
            left += getattr(node, name, ())


def rooms_imported_by(path: Path) -> set[str]:
    rooms = set()
    for node in imports_in(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            names = [node.module or ""]
        rooms |= {name.split(".")[1] for name in names if name.startswith("vla_rl.")}
    return rooms


def modules_imported_by(path: Path, modules: set[str]) -> set[str]:
    """Return those of `modules` that a file imports."""
    found: set[str] = set()
    for node in imports_in(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= submodules & modules or {node.module}
    return found & modules


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circle_in(imports: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other in a circle, or an empty list."""
    left = {name: set(imported) for name, imported in imports.items()}
    while free := [name for name, imported in left.items() if not imported & left.keys()]:
        for name in free:
            del left[name]
    if not left:
        return []
    path = [next(iter(left))]
    while path[-1] not in path[:-1]:
        path.append(next(iter(sorted(left[path[-1]] & left.keys()))))
    return path[path.index(path[-1]) :]


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_no_modules_of_a_room_import_each_other_in_a_circle(room: str) -> None:
    files = {module_name(path): path for path in (PACKAGE / room).rglob("*.py")}
    assert not circle_in(
        {name: modules_imported_by(path, set(files)) for name, path in files.items()}
    )


def test_no_rooms_import_each_other_in_a_circle() -> None:
    assert not circle_in(MAY_IMPORT)


def test_a_circle_is_found_wherever_the_import_stands(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f():\n    from room import b\n")
    (tmp_path / "b.py").write_text("if TYPE_CHECKING:\n    import room.a\n")
    (tmp_path / "c.py").write_text("from room.b import f\n")
    modules = {"room.a", "room.b", "room.c"}
    imports = {
        name: modules_imported_by(tmp_path / f"{name[-1]}.py", modules) for name in sorted(modules)
    }
    assert circle_in(imports) == ["room.a", "room.b", "room.a"]


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_a_room_imports_only_what_stands_below_it(room: str) -> None:
    module = PACKAGE / f"{room}.py"
    files = [module] if module.exists() else sorted((PACKAGE / room).rglob("*.py"))
    assert files
    wrong = {
        f"{path.relative_to(PACKAGE)} imports {imported}"
        for path in files
        for imported in rooms_imported_by(path) - MAY_IMPORT[room] - {room}
    }
    assert not wrong


def test_every_room_has_its_arrows_declared() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    rooms |= {path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__"}
    assert rooms == set(MAY_IMPORT)


def test_the_root_shows_the_rooms_that_people_look_for() -> None:
    for name in ("envs", "models", "recipes", "assets", "requirements"):
        assert (PACKAGE.parent / name).resolve() == PACKAGE / name


WITHOUT_TORCH = (
    "vla_rl.types",
    "vla_rl.graph",
    "vla_rl.actors",
    "vla_rl.cluster",
    "vla_rl.cluster.listed_hosts",
    "vla_rl.rollout",
    "vla_rl.remote_rollout.host_runner",
    "vla_rl.env_workers",
    "vla_rl.reporting",
    "vla_rl.datasets",
    "vla_rl.replay",
    "vla_rl.envs",
    "vla_rl.envs.toy",
    "vla_rl.envs.libero",
    "vla_rl.envs.metaworld",
    "vla_rl.envs.text",
    "vla_rl.sandbox",
    "vla_rl.scoring",
    "vla_rl.endpoint",
)


def test_no_torch_comes_with_the_rooms_that_simulator_processes_import() -> None:
    # one after another in one process: the first that brings one of them is named
    probe = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
    if found := {"torch", "transformers", "vllm", "timm"} & set(sys.modules):
        sys.exit(f"{module} imports {sorted(found)}")
"""
    done = subprocess.run(
        [sys.executable, "-c", probe, *WITHOUT_TORCH], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_types_import_in_an_instant() -> None:
    probe = (
        "import sys, vla_rl.types; print(len([m for m in sys.modules if m.split('.')[0] in "
        "('gymnasium', 'zmq')]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "0"
